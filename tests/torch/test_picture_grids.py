"""Grids of pictures and sounds: each patch is where the model read it, by its configuration or the caller's grid."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import regard
from captures import assert_weights, detr, eager
from regard.interpret.capture import pictures
from regard.interpret.capture.captured import Capture
from regard.interpret.capture.grids import PatchGrid
from regard.interpret.capture.layers import Layer
from regard.viewer.scene.sources import captured

pytestmark = pytest.mark.engine("tiled")

try:
    import transformers as t
except ImportError:
    t = None

needs_transformers = pytest.mark.skipif(t is None, reason="needs transformers: pip install 'regard[transformers]'")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VISION = SMALL | {"image_size": 32, "patch_size": 8}
TEXT = SMALL | {"num_key_value_heads": 2, "vocab_size": 120}
VIDEO = {"image_token_id": 99, "video_token_id": 96, "vision_start_token_id": 97, "vision_end_token_id": 98}
PATCH = 8

Inputs = Callable[[np.ndarray], dict[str, Any]]  # of a picture (3, height, width)


def whole(picture: np.ndarray) -> dict[str, Any]:
    return {"pixel_values": torch.tensor(picture)[None]}


def with_words(tokens: int, inputs: Inputs = whole) -> Inputs:
    """Inputs of a model that reads a text too, in which `tokens` tokens stand for the picture."""

    def made(picture: np.ndarray) -> dict[str, Any]:
        ids = torch.tensor([[1, 5, *[99] * tokens, 7, 8]])
        more = {"mm_token_type_ids": (ids == 99).int()} if inputs is not whole else {}
        return inputs(picture) | {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | more

    return made


def in_blocks(picture: np.ndarray) -> dict[str, Any]:
    """Patches in the order of Qwen-VL's processor: blocks of 2 × 2, each patch twice in time."""
    rows, columns = (size // PATCH for size in picture.shape[1:])
    x = picture.reshape(3, rows // 2, 2, PATCH, columns // 2, 2, PATCH).transpose(1, 4, 2, 5, 0, 3, 6)
    x = np.repeat(x.reshape(rows * columns, 3, 1, PATCH, PATCH), 2, axis=2).reshape(rows * columns, -1)
    return {"pixel_values": torch.tensor(x), "image_grid_thw": torch.tensor([[1, rows, columns]])}


def tower_in_blocks(picture: np.ndarray) -> dict[str, Any]:
    of = in_blocks(picture)
    return {"hidden_states": of["pixel_values"], "grid_thw": of["image_grid_thw"]}


def in_rows(picture: np.ndarray) -> dict[str, Any]:
    """Patches in the order of SigLIP 2's processor, with two of padding."""
    rows, columns = (size // PATCH for size in picture.shape[1:])
    x = picture.reshape(3, rows, PATCH, columns, PATCH).transpose(1, 3, 2, 4, 0).reshape(rows * columns, -1)
    x = np.concatenate([x, np.zeros((2, x.shape[1]), np.float32)])
    mask = torch.tensor([[1] * (len(x) - 2) + [0, 0]])
    return {"pixel_values": torch.tensor(x)[None], "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor([[rows, columns]])}  # fmt: skip


def with_sizes(picture: np.ndarray) -> dict[str, Any]:
    """A picture padded to a larger one, as Pixtral's processor does."""
    padded = np.zeros((1, 3, 64, 64), np.float32)
    padded[0, :, : picture.shape[1], : picture.shape[2]] = picture
    return {"pixel_values": torch.tensor(padded), "image_sizes": torch.tensor([picture.shape[1:]])}


def tiles(picture: np.ndarray) -> dict[str, Any]:
    return {"pixel_values": torch.tensor(picture)[None, None]}


def qwen(kind: str) -> Any:
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32,
              "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}  # fmt: skip
    turned = {"rope_type": "default", "rope_theta": 1e4}
    if kind == "Qwen3":
        more = {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        text = TEXT | {"head_dim": 8, "rope_parameters": turned | {"mrope_section": [2, 1, 1]}}
    else:
        more = {"window_size": 32, "fullatt_block_indexes": [1]}
        text = TEXT | {"rope_parameters": turned | {"mrope_section": [1, 1, 2]}}
    config = getattr(t, f"{kind}VLConfig")(text_config=text, vision_config=vision | more, **VIDEO)
    return getattr(t, f"{kind}VLForConditionalGeneration")(config)


def llava() -> Any:
    vision = {"model_type": "clip_vision_model", **VISION, "projection_dim": 32}
    config = t.LlavaConfig(vision_config=vision, text_config={"model_type": "llama", **TEXT}, image_token_index=99)
    return t.LlavaForConditionalGeneration(config)


def pixtral() -> Any:
    return t.PixtralVisionModel(t.PixtralVisionConfig(**SMALL, image_size=64, patch_size=PATCH))


def internvl() -> Any:
    sides = {"image_size": [32, 32], "patch_size": [PATCH, PATCH]}
    return t.InternVLVisionModel(t.InternVLVisionConfig(**SMALL | sides))


def idefics() -> Any:
    config = t.Idefics3Config(
        vision_config=VISION, text_config={"model_type": "llama", **TEXT}, image_token_id=99, scale_factor=2
    )
    return t.Idefics3ForConditionalGeneration(config)


def sam() -> Any:
    return t.SamVisionModel(t.SamVisionConfig(
        hidden_size=32, output_channels=32, num_hidden_layers=2, num_attention_heads=4, image_size=32,
        patch_size=PATCH, window_size=2, global_attn_indexes=[0], mlp_dim=48,
    ))  # fmt: skip


# By name: the model, its inputs, the size of the picture, and of grids where tokens are no patches of `PATCH` pixels.
MODELS: dict[str, tuple[Callable[[], Any], Inputs, tuple[int, int]]] = {
    "ViT": (lambda: t.ViTModel(t.ViTConfig(**VISION)), whole, (32, 32)),
    "DeiT": (lambda: t.DeiTModel(t.DeiTConfig(**VISION)), whole, (32, 32)),
    "DINOv2": (lambda: t.Dinov2Model(t.Dinov2Config(**VISION)), whole, (32, 32)),
    "registers": (
        lambda: t.Dinov2WithRegistersModel(t.Dinov2WithRegistersConfig(**VISION, num_register_tokens=4)),
        whole,
        (32, 32),
    ),
    "DINOv3": (lambda: t.DINOv3ViTModel(t.DINOv3ViTConfig(**VISION, num_register_tokens=4)), whole, (32, 48)),
    "CLIP": (lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**VISION)), whole, (32, 32)),
    "SigLIP": (lambda: t.SiglipVisionModel(t.SiglipVisionConfig(**VISION)), whole, (32, 32)),
    "NaFlex": (
        lambda: t.Siglip2VisionModel(t.Siglip2VisionConfig(**SMALL, patch_size=PATCH, num_patches=16)),
        in_rows,
        (16, 48),
    ),
    "SAM": (sam, whole, (32, 32)),
    "DETR": (detr, whole, (32, 64)),
    "LLaVA": (llava, with_words(16), (32, 32)),
    "Pixtral": (pixtral, with_sizes, (32, 48)),
    "InternVL": (internvl, whole, (32, 32)),
    "Idefics3": (idefics, with_words(4, tiles), (32, 32)),
    "Qwen2.5-VL": (lambda: qwen("Qwen2_5_"), with_words(6, in_blocks), (32, 48)),
    "Qwen3-VL": (lambda: qwen("Qwen3"), with_words(6, in_blocks), (32, 48)),
}


GIVEN = {"DETR": (4, 8)}
"""Grids of models whose configuration says nothing of patches."""


def built(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # initial positions and biases are zero
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def seen_by(model: Any, name: str, picture: np.ndarray) -> Capture:
    inputs = MODELS[name][1](picture)
    if name == "Idefics3":
        inputs.pop("mm_token_type_ids")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", regard.RegardWarning)  # of models that run, but not on regard in each part
        with regard.capture(model, grid=GIVEN.get(name)) as seen:
            model(**inputs)
    return seen


@needs_transformers
@pytest.mark.parametrize("name", MODELS)
def test_a_patch_is_where_the_model_read_it(name: str) -> None:
    """A light patch changes the keys of its own token most, and is light in the picture there."""
    height, width = MODELS[name][2]
    dark, model = np.full((3, height, width), -1, np.float32), built(name)  # Idefics leaves out pictures of zeros
    before = seen_by(model, name, dark)
    light = dark.copy()
    row, column = height // PATCH - 1, 1
    light[:, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] = 3
    after = seen_by(model, name, light)
    assert any(layer.grids for layer in after)
    for one, other in zip(before, after, strict=True):
        for grid in other.grids[:1]:
            change = np.square(other.key - one.key).sum((0, 1, 3))
            at = np.unravel_index(np.nanargmax(grid.laid(change)), (grid.rows, grid.columns))
            scale = height // PATCH / grid.rows
            off = np.abs(np.subtract(at, (int(row / scale), int(column / scale))))
            assert off.max() <= (name == "DETR")  # whose backbone reads around each patch
            assert change.argmax() in grid.tokens or other.name.startswith("decoder")
            assert grid.picture is not None
            cells = grid.picture[..., 0].reshape(grid.rows, grid.picture.shape[0] // grid.rows, grid.columns, -1)
            lightest = np.unravel_index(cells.mean((1, 3)).argmax(), (grid.rows, grid.columns))
            assert lightest == (int(row / scale), int(column / scale))


def of_tiles(name: str, most: int = 9) -> Any:
    """A model that reads a picture of 32 × 32, and tiles of that size."""
    pinpoints = {"image_grid_pinpoints": [[32, 64], [64, 32], [64, 64], [32, 96]], "image_token_index": 99}
    torch.manual_seed(0)
    if name == "LLaVA-NeXT":
        vision = {"model_type": "clip_vision_model", **VISION, "projection_dim": 32}
        config = t.LlavaNextConfig(vision_config=vision, text_config={"model_type": "llama", **TEXT}, **pinpoints)
        return t.LlavaNextForConditionalGeneration(config).eval()
    vision = {"model_type": "siglip_vision_model", **VISION, "vision_use_head": False}
    more = pinpoints | {"vision_aspect_ratio": f"anyres_max_{most}", "vision_feature_select_strategy": "full"}
    config = t.LlavaOnevisionConfig(vision_config=vision, text_config={"model_type": "qwen2", **TEXT}, **more)
    return t.LlavaOnevisionForConditionalGeneration(config).eval()


def seen_in_tiles(model: Any, tiles: list[torch.Tensor], sizes: list[tuple[int, int]], tokens: int) -> Layer:
    """The first layer of a text with pictures of these sizes, each as a whole and its tiles (tiles, 3, 32, 32)."""
    ids, most = torch.tensor([[1, 5, *[99] * tokens, 7, 8]]), max(len(x) for x in tiles)
    padded = torch.stack([nn.functional.pad(x, (0,) * 7 + (most - len(x),)) for x in tiles])
    with torch.no_grad(), regard.capture(model) as seen:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=padded, image_sizes=torch.tensor(sizes))
    return next(layer for layer in seen if layer.key_tokens)


@needs_transformers
@pytest.mark.parametrize("name", ["LLaVA-NeXT", "LLaVA-OneVision"])
def test_pictures_in_tiles(name: str) -> None:
    """The whole pictures have 4 × 4 patches; their tiles 2 × 8 that are no padding, and 8 × 4."""
    model, sizes = of_tiles(name), [(20, 60), (64, 36)]
    tokens = [16 + 2 * (8 + 1), 16 + 8 * (4 + 1)]
    dark = [torch.full((3, 3, 32, 32), -1.0), torch.full((5, 3, 32, 32), -1.0)]
    before = seen_in_tiles(model, dark, sizes, sum(tokens))
    names = [grid.name for grid in before.grids]
    assert names == ["picture 1, whole", "picture 1, tiles", "picture 2, whole", "picture 2, tiles"]
    assert [(grid.rows, grid.columns) for grid in before.grids] == [(4, 4), (2, 8), (4, 4), (8, 4)]
    # A picture, a tile of it, a row and a column of patches there: the grid, and the patch of it
    for picture, tile, row, column, number, patch in (
        (0, 0, 3, 1, 0, (3, 1)), (0, 1, 1, 0, 1, (0, 0)), (0, 2, 2, 3, 1, (1, 7)), (1, 0, 0, 2, 2, (0, 2)),
        (1, 1, 3, 2, 3, (3, 0)), (1, 2, 0, 1, 3, (0, 3)), (1, 4, 3, 0, 3, (7, 2)),
    ):  # fmt: skip
        light = [x.clone() for x in dark]
        light[picture][tile, :, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH] = 3
        after = seen_in_tiles(model, light, sizes, sum(tokens))
        grid = after.grids[number]
        change = np.square(after.key - before.key).sum((0, 1, 3))
        assert grid.tokens[patch[0] * grid.columns + patch[1]] == change.argmax()
        cells = grid.picture[..., 0].reshape(grid.rows, PATCH, grid.columns, PATCH).mean((1, 3))
        assert np.unravel_index(cells.argmax(), cells.shape) == patch


@needs_transformers
def test_tiles_at_a_lower_resolution() -> None:
    """4 × 8 patches are more than one tile's 4 × 4: the model reads them as 2 × 5."""
    model, dark = of_tiles("LLaVA-OneVision", most=1), torch.full((3, 3, 32, 32), -1.0)
    light = dark.clone()
    light[2, :, 8:16, 24:] = 3  # row 1 of 4, column 7 of 8
    before, after = (seen_in_tiles(model, [x], [(32, 64)], 16 + 2 * (5 + 1)) for x in (dark, light))
    _, tiles = after.grids
    assert (tiles.rows, tiles.columns, tiles.picture.shape) == (2, 5, (32, 64, 3))
    assert tiles.tokens.tolist() == [*range(18, 23), *range(24, 29)]
    change = np.square(after.key - before.key).sum((0, 1, 3))
    assert change.argmax() == tiles.tokens[4]


@needs_transformers
def test_several_pictures_without_tiles() -> None:
    """OneVision reads several pictures of a text whole, each with a token for a new line."""
    model, ids = of_tiles("LLaVA-OneVision"), torch.tensor([[1, *[99] * 17, 7, *[99] * 17, 8]])
    given = {"attention_mask": torch.ones_like(ids), "image_sizes": torch.tensor([[32, 32], [32, 32]])}
    pixels = torch.zeros(2, 1, 3, 32, 32)
    with torch.no_grad(), regard.capture(model) as seen:
        model(input_ids=ids, pixel_values=pixels, batch_num_images=torch.tensor([2]), **given)
    layer = next(layer for layer in seen if layer.key_tokens)
    assert [grid.tokens.tolist() for grid in layer.grids] == [[*range(1, 17)], [*range(19, 35)]]
    assert [grid.name for grid in layer.grids] == ["picture 1, whole", "picture 2, whole"]


def in_frames(frames: np.ndarray) -> dict[str, Any]:
    """A video of frames (t, 3, height, width) as Qwen-VL's processor gives it."""
    each = [in_blocks(frame)["pixel_values"] for frame in frames]
    rows, columns = (size // PATCH for size in frames.shape[2:])
    return {"pixel_values_videos": torch.cat(each), "video_grid_thw": torch.tensor([[len(frames), rows, columns]])}


@needs_transformers
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen2_5_", "Qwen3"])
def test_frames_of_a_video(kind: str) -> None:
    """A picture of 4 × 4 patches, then a video of 3 frames of 4 × 6, of which the model makes one token of 2 × 2."""
    torch.manual_seed(0)
    model = qwen(kind).eval()
    frame = [96] * 6
    between = [7] if kind == "Qwen3" else []  # the time of the next frame
    ids = torch.tensor([[1, *[99] * 4, 5, *frame, *between, *frame, *between, *frame, 8]])
    types = (ids == 99).int() + 2 * (ids == 96).int()
    more = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types}

    def seen(frames: np.ndarray) -> Any:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore", regard.RegardWarning)
            with regard.capture(model) as made:
                model(**in_blocks(np.zeros((3, 32, 32), np.float32)), **in_frames(frames), **more)
        return made

    dark = np.full((3, 3, 32, 48), -1, np.float32)
    light = dark.copy()
    light[1, :, 24:, 8:16] = 3  # row 3 of 4, column 1 of 6
    before, after = seen(dark), seen(light)
    text = next(n for n, layer in enumerate(after) if layer.key_tokens)
    picture, *frames = after[text].grids
    assert (picture.name, picture.tokens.tolist()) == ("", [1, 2, 3, 4])
    assert [(one.name, one.rows, one.columns) for one in frames] == [(f"frame {n}", 2, 3) for n in (1, 2, 3)]
    assert [one.tokens[0] for one in frames] == np.flatnonzero(ids[0] == 96)[::6].tolist()
    tower = [n for n, layer in enumerate(after) if len(layer.grids) == 3]
    for n, scale in (*((n, 1) for n in tower), (text, 2)):
        grids = after[n].grids[-3:]
        change = np.square(after[n].key - before[n].key).sum((0, 1, 3))
        assert grids[1].tokens[3 // scale * grids[1].columns + 1 // scale] == change.argmax()
        assert grids[1].picture.max() == 255 > grids[0].picture.max()
    assert tower
    assert len(after[text].element(0).grids) == 4


@needs_transformers
def test_words_beside_a_video(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, ids = qwen("Qwen2_5_").eval(), torch.tensor([[1, *[96] * 6, 7, 8]])
    more = {"attention_mask": torch.ones_like(ids), "mm_token_type_ids": 2 * (ids == 96).int()}
    with torch.no_grad(), regard.capture(model, queries="text") as seen:
        model(input_ids=ids, **in_frames(np.zeros((1, 3, 32, 48), np.float32)), **more)
    assert {layer.rows for layer in seen} == {(0, 7, 8)}
    seen.save(tmp_path / "x")
    assert [grid.name for grid in Capture.load(tmp_path / "x")[0].grids] == ["frame 1"]


@needs_transformers
@pytest.mark.parametrize("name", ["ViT", "registers", "CLIP", "DETR", "LLaVA", "Qwen2.5-VL"])
def test_weights_on_a_grid_are_those_of_eager(name: str) -> None:
    model, (height, width) = built(name), MODELS[name][2]
    picture = np.random.default_rng(0).standard_normal((3, height, width)).astype(np.float32)
    seen, inputs = seen_by(model, name, picture), MODELS[name][1](picture)
    expected = eager(model, **inputs)
    if name in ("LLaVA", "Qwen2.5-VL"):  # whose outputs have the text's attention alone
        seen = Capture([layer for layer in seen if layer.key_tokens])
    assert_weights(seen, expected)
    layer, theirs = seen[-1], expected[-1][0, 1, -1].numpy()
    (grid,) = layer.grids
    ours = grid.laid(layer.weights(1, rows=slice(layer.n_q - 1, None)))[0]
    first = (
        int(np.flatnonzero(inputs["input_ids"][0].numpy() == 99)[0]) if layer.key_tokens else len(theirs) - ours.size
    )
    np.testing.assert_allclose(ours.ravel(), theirs[first : first + ours.size], rtol=0, atol=1e-5)


@needs_transformers
def test_a_head_that_looks_at_a_corner() -> None:
    """[CLS] looks for the position of the first patch, in a model whose first layer was made by hand."""
    model = built("ViT")
    layer = next(x for x in model.modules() if type(x).__name__ == "ViTAttention")
    wanted = torch.zeros(32)
    wanted[:8] = torch.tensor([1.0, -1.0] * 4)
    names = {name.rpartition(".")[2]: x for name, x in layer.named_modules() if isinstance(x, nn.Linear)}
    query, key = (names.get(f"{x}_proj", names.get(long)) for x, long in (("q", "query"), ("k", "key")))
    with torch.no_grad():
        query.weight.zero_(), query.bias.copy_(20 * wanted)
        key.weight.copy_(torch.eye(32)), key.bias.zero_()
        positions = next(x for name, x in model.named_parameters() if name.endswith("position_embeddings"))
        positions[0, 1] = 20 * wanted
    layer = seen_by(model, "ViT", np.zeros((3, 32, 32), np.float32))[0]
    heat = layer.grids[0].laid(layer.weights(0))[0]
    assert heat[0, 0] > 0.99
    assert heat.shape == (4, 4)


@needs_transformers
def test_sounds_have_frames_and_seconds() -> None:
    torch.manual_seed(0)
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder")
             for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))}  # fmt: skip
    config = t.WhisperConfig(
        d_model=32, **sides, vocab_size=60, max_source_positions=40, max_target_positions=20, num_mel_bins=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    model = t.WhisperForConditionalGeneration(config).eval()
    features = torch.zeros(1, 8, 80)
    features[:, 2, 60:62] = 3
    with torch.no_grad(), regard.capture(model) as seen:
        for heard in (torch.zeros(1, 8, 80), features):  # the second takes the place of the first
            model(input_features=heard, decoder_input_ids=torch.tensor([[1, 5, 6]]))
    encoder, own, cross = seen
    assert own.grids == ()
    for layer in (encoder, cross):
        (grid,) = layer.grids
        assert (grid.kind, grid.rows, grid.columns, grid.seconds) == ("sound", 1, 40, 0.8)
        np.testing.assert_array_equal(grid.tokens, np.arange(40))
        assert np.argwhere(grid.picture[..., 0] == 255).tolist() == [[5, 60], [5, 61]]  # low frequencies below


@needs_transformers
def test_patches_of_a_spectrogram() -> None:
    torch.manual_seed(0)
    model = t.ASTModel(t.ASTConfig(**SMALL, max_length=32, num_mel_bins=32, frequency_stride=16, time_stride=16)).eval()
    dark = torch.zeros(1, 32, 32)
    light = dark.clone()
    light[:, 16:, :16] = 3  # late and low
    keys = []
    for given in (dark, light):
        with torch.no_grad(), regard.capture(model) as seen:
            model(input_values=given)
        keys.append(seen[0].key)
    (grid,) = seen[0].grids
    change = grid.laid(np.square(keys[1] - keys[0]).sum((0, 1, 3)))
    assert (grid.kind, grid.rows, grid.columns, grid.seconds) == ("sound", 2, 2, 0.32)
    assert np.unravel_index(change.argmax(), (2, 2)) == (1, 1)
    assert grid.picture[-1, -1, 0] == 255 > grid.picture[0, 0, 0]


@needs_transformers
def test_frames_of_samples() -> None:
    """Frames of wav2vec 2.0 follow from the convolutions that its configuration lists; a rate gives seconds."""
    torch.manual_seed(0)
    small = {"conv_dim": (8, 8), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_conv_pos_embeddings": 4,
             "num_conv_pos_embedding_groups": 2}  # fmt: skip
    model = t.Wav2Vec2Model(t.Wav2Vec2Config(**SMALL, **small)).eval()
    samples = torch.zeros(1, 400)
    samples[:, 300:] = torch.randn(100)
    with torch.no_grad(), regard.capture(model, tokenizer=t.Wav2Vec2FeatureExtractor()) as seen:
        model(input_values=samples)
    (grid,) = seen[0].grids
    assert (grid.kind, grid.rows, grid.columns, grid.seconds) == ("sound", 1, 39, 0.025)
    np.testing.assert_array_equal(grid.tokens, np.arange(39))
    heights = grid.picture[..., 0].argmin(0)
    assert len(set(heights[:300])) == 1 < len(set(heights[300:]))


@needs_transformers
@pytest.mark.filterwarnings("ignore:ResNetPreTrainedModel does not support:regard.RegardWarning")
def test_models_without_a_grid() -> None:
    """Windows lie in the batch, MAE reads some patches, in two other tokens follow, and DETR's says no patches."""
    swin = t.SwinModel(
        t.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[1], num_heads=[2], window_size=4)
    )
    mae = t.ViTMAEModel(t.ViTMAEConfig(**VISION, mask_ratio=0.5))
    yolos = t.YolosModel(t.YolosConfig(**VISION | {"image_size": [32, 32]}, num_detection_tokens=10))
    llama = t.Llama4VisionModel(t.Llama4VisionConfig(
        **SMALL | {"intermediate_size": 128}, image_size=32, patch_size=PATCH, vision_output_dim=32,
        projector_input_dim=32, projector_output_dim=32,
    ))  # fmt: skip
    for model in (swin, mae, yolos, llama, detr()):
        with torch.no_grad(), regard.capture(model.eval()) as seen:
            model(pixel_values=torch.zeros(1, 3, 32, 32))
        assert [layer.grids for layer in seen] == [()] * len(seen)
        with pytest.raises(ValueError, match="image goes with a grid of patches, and no layer has one"):
            seen.showing(np.zeros((4, 4, 3), np.uint8))


@needs_transformers
def test_pixels_that_fill_no_patch_are_not_shown() -> None:
    """SigLIP reads 384 × 384 pixels in 27 × 27 patches of 14."""
    model = t.SiglipVisionModel(t.SiglipVisionConfig(**SMALL, image_size=36, patch_size=PATCH)).eval()
    values = torch.zeros(1, 3, 36, 36)
    values[..., 24:32, 8:16] = 1
    with torch.no_grad(), regard.capture(model) as seen:
        model(pixel_values=values)
    (grid,) = seen[0].grids
    assert (grid.rows, grid.columns, grid.picture.shape) == (4, 4, (32, 32, 3))
    assert (grid.picture[24:, 8:16] == 255).all()


@needs_transformers
def test_pictures_of_a_batch() -> None:
    model = built("ViT")
    values = torch.zeros(2, 3, 32, 32)
    values[0, :, :8, :8] = values[1, :, 24:, 24:] = 1
    with torch.no_grad(), regard.capture(model) as seen:
        model(pixel_values=values)
    first, second = seen[0].grids
    assert (first.batch, second.batch) == (0, 1)
    assert (first.picture[0, 0, 0], first.picture[-1, -1, 0]) == (255, 0)
    assert (second.picture[0, 0, 0], second.picture[-1, -1, 0]) == (0, 255)
    (own,) = seen[0].element(1).grids
    assert own.picture is second.picture


@needs_transformers
@pytest.mark.filterwarnings("ignore:ResNetPreTrainedModel does not support:regard.RegardWarning")
def test_a_given_grid_is_that_of_patches_alone() -> None:
    """DETR's decoder attends to as many object queries as there are patches: these are no patches."""
    model = built("DETR")
    with torch.no_grad(), regard.capture(model, grid=(4, 4)) as seen:
        model(pixel_values=torch.zeros(1, 3, 32, 32))
    assert [(layer.name, layer.n_k, len(layer.grids)) for layer in seen] == [
        ("encoder.layers.0.self_attn", 16, 1), ("decoder.layers.0.self_attn", 16, 0),
        ("decoder.layers.0.encoder_attn", 16, 1),
    ]  # fmt: skip


class Attending(nn.Module):
    """Attention of patches, as in a model without a configuration."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_a_given_grid(tmp_path: Any) -> None:
    model, x = Attending(), torch.randn(1, 2, 13, 4)
    with regard.capture(model, grid=(3, 4), image=np.full((30, 40, 3), 7, np.uint8), path=tmp_path / "x") as seen:
        model(x)
    (grid,) = seen[0].grids
    assert (grid.rows, grid.columns, grid.batch, grid.picture.shape) == (3, 4, None, (30, 40, 3))
    np.testing.assert_array_equal(grid.tokens, 1 + np.arange(12))
    (read,) = Capture.load(tmp_path / "x")[0].grids
    np.testing.assert_array_equal(read.tokens, grid.tokens)
    np.testing.assert_array_equal(read.picture, grid.picture)
    own = PatchGrid(2, 2, np.array([5, -1, 7, 0]))
    with regard.capture(model, grid=own) as seen:
        model(x)
    assert seen[0].grids == (own,)
    heat = own.laid(np.arange(13.0))
    np.testing.assert_array_equal(heat, [[5, np.nan], [7, 0]])


class Convolving(Attending):
    """Attention of patches that a convolution makes, as in a model of timm."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 4, PATCH, PATCH)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return super().forward(self.patches(pixel_values).flatten(2).mT[:, None])


def test_no_grid_is_guessed_from_a_convolution() -> None:
    model, pixels = Convolving(), torch.zeros(2, 3, 16, 24)
    pixels[1, :, :8, :8] = 1
    with regard.capture(model) as seen:
        model(pixels)
    assert seen[0].grids == ()
    with regard.capture(model, grid=(2, 3)) as seen:
        model(pixels)
    assert [(x.batch, x.tokens.tolist(), x.picture[0, 0, 0]) for x in seen[0].grids] == [
        (0, list(range(6)), 0), (1, list(range(6)), 255),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"grid": 4}, TypeError, "grid must be (rows, columns) of patches or a PatchGrid, got 4"),
        ({"grid": (0, 4)}, TypeError, "grid must be (rows, columns) of patches or a PatchGrid, got (0, 4)"),
        ({"grid": (5, 5)}, ValueError, "grid of 5 × 5 = 25 patches fits no layer: layers have 13 keys"),
        ({"image": 3}, TypeError, "image must be a path, a picture of Pillow or an array of pixels, got int"),
        (
            {"image": np.zeros((2, 2, 3))},
            TypeError,
            "image must have pixels (height, width) or (height, width, 3) of uint8, got (2, 2, 3) of float64",
        ),
        (
            {"image": np.zeros((2, 2, 3), np.uint8)},
            ValueError,
            "a picture goes with a grid of patches, and no configuration of Attending has patch_size. Capture it with "
            "regard.capture(model, grid=(rows, columns)), whose product is the number of its patches",
        ),
    ],
)
def test_what_is_no_grid_or_picture(given: Any, error: Any, message: str) -> None:
    model = Attending()
    with pytest.raises(error, match=re.escape(message)), regard.capture(model, **given):
        model(torch.randn(1, 2, 13, 4))


def test_pixels() -> None:
    """Pixels are those of a processor, undone; pictures that are too large are averaged."""
    x = np.random.default_rng(0).integers(0, 256, (5, 6, 3), np.uint8)
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.25]
    normal = ((x / 255 - mean) / std).transpose(2, 0, 1)
    np.testing.assert_array_equal(pictures.coloured(normal, mean, std), x)
    assert pictures.coloured(np.array([[[-1.0, 3.0]]]))[0, :, 0].tolist() == [0, 255]
    large = np.zeros((2, 2048, 3), np.uint8)
    large[:, 1::2] = 200
    assert (pictures.reduced(large) == 100).all()
    loud = np.concatenate([np.zeros(5120), np.sin(np.arange(5120))])
    wave = pictures.waveform(loud)[..., 0] == 0
    assert wave.shape == (128, 1024)
    assert (wave[:, :512].sum(0) == 1).all()
    assert (wave[:, 512:].sum(0) > 100).all()


# Chosen queries


@needs_transformers
@pytest.mark.parametrize(
    ("name", "queries"),
    [("LLaVA", "text"), ("LLaVA", [1, 4, 9, 2, 4]), ("LLaVA", range(5, 9)), ("Qwen2.5-VL", "text")],
)
def test_chosen_queries_have_their_rows_of_all_weights(name: str, queries: Any, tmp_path: Any) -> None:
    model, (height, width) = built(name), MODELS[name][2]
    picture = np.random.default_rng(0).standard_normal((3, height, width)).astype(np.float32)
    every, inputs = seen_by(model, name, picture), MODELS[name][1](picture)
    with torch.no_grad(), regard.capture(model, queries=queries, tokenizer=lambda ids: list(map(str, ids))) as seen:
        model(**inputs)
    ids = inputs["input_ids"][0].numpy()
    rows = np.flatnonzero(ids != 99) if queries == "text" else np.unique(queries)
    assert bool([layer for layer in seen if layer.key_tokens is None]) == (queries != "text")
    seen.save(tmp_path / "x")
    for layer in (*seen, *Capture.load(tmp_path / "x")):
        whole = every[layer.name]
        assert layer.rows == tuple(rows)
        assert (layer.n_q, layer.n_k) == (len(rows), whole.n_k)
        for head in layer.numbers:
            np.testing.assert_allclose(layer.weights(head), whole.weights(head)[rows], rtol=0, atol=1e-6)
        np.testing.assert_array_equal(layer.grids[0].tokens, whole.grids[0].tokens)
    if queries == "text":
        assert seen.labels(0, "query") == tuple(map(str, ids[rows]))
        assert seen.labels(0, "key") == tuple(map(str, ids))
        assert seen.nbytes < 0.7 * sum(every[layer.name].nbytes for layer in seen)
        assert all(np.isnan(head.scores["previous token"]) for head in seen.measure())
        (scene,) = captured(seen)
        assert scene.described("x")["grids"][0]["side"] == "keys"
        assert "queries of 4 tokens were kept, and keys of all" in scene.note


def test_chosen_queries_of_masks_and_biases() -> None:
    """Rules see the positions of the queries, and arrays are those of their rows."""
    bias, hidden = torch.randn(2, 13, 13), torch.rand(1, 1, 13, 13) < 0.5
    hidden |= torch.eye(13, dtype=torch.bool)
    for options in ({"attn_mask": bias}, {"attn_mask": hidden}, {"is_causal": True}):

        class Masked(nn.Module):
            def forward(self, x: torch.Tensor, given: dict[str, Any] = options) -> torch.Tensor:
                return nn.functional.scaled_dot_product_attention(x, x, x, **given)

        model, x, rows = Masked(), torch.randn(2, 2, 13, 4), [0, 3, 4, 12]
        with regard.capture(model) as every:
            model(x)
        with regard.capture(model, queries=rows) as seen:
            model(x)
        for head in (0, 1):
            for b in (0, 1):
                expected = every[0].weights(head, batch=b)[rows]
                np.testing.assert_allclose(seen[0].weights(head, batch=b), expected, rtol=0, atol=1e-6)


@needs_transformers
def test_chosen_queries_of_pieces_are_refused() -> None:
    """Windows of a picture are pieces of a sequence."""
    model, inputs = built("Qwen2.5-VL"), MODELS["Qwen2.5-VL"][1](np.zeros((3, 32, 48), np.float32))
    with pytest.warns(regard.RegardWarning, match="in pieces"), torch.no_grad():  # noqa: SIM117
        with regard.capture(model, queries=[0, 3]) as seen:
            model(**inputs)
    assert "model.visual.blocks.0.attn" in seen.dropped


@needs_transformers
def test_chosen_queries_are_those_of_one_forward() -> None:
    from small_models import MODELS as DECODERS

    model = DECODERS["llama"].build()
    with (
        pytest.warns(regard.RegardWarning, match="run the whole text once"),
        regard.capture(model, queries=[0]) as seen,
    ):
        model.generate(torch.tensor([[1, 5, 7]]), max_new_tokens=3)
    assert len(seen) == 0


@pytest.mark.parametrize("queries", ["words", [], [-1], [0.5], 3.0, object()])
def test_what_are_no_queries(queries: Any) -> None:
    with (
        pytest.raises(TypeError, match=r"queries must be rows of a sequence, from 0 on, or 'text', got"),
        regard.capture(Attending(), queries=queries),
    ):
        pass
