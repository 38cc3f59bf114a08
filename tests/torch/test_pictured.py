"""`regard look --model ... --image ...` and `regard.look(model, image=...)`: models that read pictures."""

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from captures import detr
from regard.cli import main
from regard.viewer.looking import scenes_of

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[transformers]'")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VISION = SMALL | {"image_size": 32, "patch_size": 8}
PIXELS = np.random.default_rng(0).integers(0, 256, (40, 70, 3), np.uint8)
SIZE = {"height": 32, "width": 32}


@pytest.fixture(scope="module")
def cat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cat") / "cat.png"
    Image.fromarray(PIXELS).save(path)
    return path


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("vit")
    transformers.ViTForImageClassification(transformers.ViTConfig(**VISION, num_labels=3)).save_pretrained(path)
    transformers.ViTImageProcessor(size=SIZE).save_pretrained(path)
    return path


def llava() -> tuple[Any, Any]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<s>", "<unk>", "<image>", "what", "is", "it", "USER"]
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", unk_token="<unk>", additional_special_tokens=["<image>"]
    )
    tokenizer.image_token, tokenizer.image_token_id = "<image>", 2
    template = (
        "USER {% for part in messages[0].content %}"
        "{% if part.type == 'image' %}<image> {% else %}{{ part.text }}{% endif %}{% endfor %}"
    )
    processor = transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SIZE), tokenizer, patch_size=8,
        vision_feature_select_strategy="default", num_additional_image_tokens=1, chat_template=template,
    )  # fmt: skip
    vision = {"model_type": "clip_vision_model", **VISION, "projection_dim": 32}
    text = {"model_type": "llama", **SMALL, "num_key_value_heads": 2, "vocab_size": 20}
    torch.manual_seed(0)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=2)
    return transformers.LlavaForConditionalGeneration(config).eval(), processor


def test_a_page_of_a_picture(vit: Path, cat: Path, tmp_path: Path) -> None:
    assert main(["look", "--model", str(vit), "--image", str(cat), "--save", str(tmp_path / "x.html")]) == 0
    data = json.loads(
        (tmp_path / "x.html").read_text("utf-8").partition('id="regard-data">')[2].partition("</script>")[0]
    )
    answers = json.loads(zlib.decompress(base64.b64decode(data["answers"])))
    (scene,) = answers["api/scenes"]["scenes"]
    (grid,) = scene["grids"]
    assert (grid["rows"], grid["columns"], grid["side"], grid["width"]) == (4, 4, "both", 32)
    assert base64.b64decode(answers[f"api/{scene['id']}/{grid['picture']}"]["bytes"]).startswith(b"\x89PNG")


def test_a_page_does_not_open_without_its_picture(
    vit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["look", "--model", str(vit), "--image", str(tmp_path / "x.png"), "--no-open"]) == 2
    said = capsys.readouterr()
    assert "http" not in said.out
    assert said.err == f"regard: error: cannot read image {tmp_path / 'x.png'}: No such file or directory\n"


def test_the_picture_is_what_the_model_saw(vit: Path, cat: Path) -> None:
    """The processor's resize, and its normalization undone; heat is that of eager."""
    model = transformers.ViTForImageClassification.from_pretrained(vit).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(vit)
    (scene,) = scenes_of(model, image=cat, tokenizer=processor)
    (grid,) = scene.grids
    resized = np.asarray(Image.fromarray(PIXELS).resize((32, 32), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(grid.picture, resized)
    assert (grid.rows, grid.columns, grid.tokens[0]) == (4, 4, 1)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**processor(images=Image.open(cat), return_tensors="pt"), output_attentions=True)
    for layer, expected in zip(scene.layers, out.attentions, strict=True):
        heat = grid.laid(layer.head(2).weights(range(1), range(17)))[0]
        np.testing.assert_allclose(heat, expected[0, 2, 0, 1:].reshape(4, 4), rtol=0, atol=1e-5)


@pytest.mark.parametrize("template", [True, False])
def test_a_picture_and_a_text(template: bool) -> None:
    model, processor = llava()
    if not template:
        processor.chat_template = None
    text, vision = scenes_of(model, image=PIXELS, text="what is it", tokenizer=processor)
    (seen,), (read,) = vision.grids, text.grids
    np.testing.assert_array_equal(seen.tokens, 1 + np.arange(16))
    first = text.key_tokens.index("<image>")
    np.testing.assert_array_equal(read.tokens, first + np.arange(16))
    assert text.key_tokens[first + 16 :] == ("what", "is", "it")
    np.testing.assert_array_equal(seen.picture, read.picture)
    assert seen.picture.shape == (32, 32, 3)


def test_an_image_of_a_capture(vit: Path, cat: Path) -> None:
    model = transformers.ViTModel.from_pretrained(vit).eval()
    with torch.no_grad(), regard.capture(model) as seen:
        model(pixel_values=torch.zeros(1, 3, 32, 32))
    (scene,) = scenes_of(seen, image=cat)
    np.testing.assert_array_equal(scene.grids[0].picture, PIXELS)
    assert seen[0].grids[0].picture.shape == (32, 32, 3)


def swin() -> tuple[Any, Any]:
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=16, depths=[1], num_heads=[2], window_size=4
    )
    return transformers.SwinModel(config).eval(), transformers.ViTImageProcessor(size=SIZE)


def yolos() -> tuple[Any, Any]:
    config = transformers.YolosConfig(**VISION | {"image_size": [32, 32]}, num_detection_tokens=10)
    return transformers.YolosModel(config).eval(), transformers.ViTImageProcessor(size=SIZE)


def blip() -> tuple[Any, Any]:
    config = transformers.BlipVisionConfig(**VISION)
    return transformers.BlipVisionModel(config).eval(), transformers.BlipImageProcessor(size=SIZE)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (swin, "SwinModel has none: none of its attention calls reads the 8 × 8 patches of its picture"),
        (yolos, "YolosModel has none: its configuration does not say where its patches are. Capture it with"),
        (blip, "the attention of BlipVisionModel cannot be looked at: BlipVisionModel computes it itself"),
    ],
)
def test_models_whose_patches_are_not_known(made: Any, message: str) -> None:
    model, processor = made()
    with pytest.raises(ValueError, match=re.escape(message)):
        scenes_of(model, image=PIXELS, tokenizer=processor)


def test_a_configuration_without_patches(cat: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What to give is said before the model runs, on the command line too."""
    model = detr().eval()
    model.save_pretrained(tmp_path / "detr")
    processor = transformers.DetrImageProcessorPil(size={"height": 32, "width": 64})
    processor.save_pretrained(tmp_path / "detr")
    model.forward = None  # so that running it would raise TypeError
    message = (
        "a picture goes with a grid of patches, and no configuration of DetrModel has patch_size. Capture it with "
        "regard.capture(model, grid=(rows, columns)), whose product is the number of its patches"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        scenes_of(model, image=cat, tokenizer=processor)
    with pytest.raises(ValueError, match=re.escape(message)), regard.capture(model, image=cat):
        pytest.fail("it began")
    given = ["--model", str(tmp_path / "detr"), "--image", str(cat), "--save", str(tmp_path / "x.html")]
    assert main(["look", *given]) == 2
    said = capsys.readouterr().err
    assert message in " ".join(said.split())
    assert "running the model" not in said
    assert not (tmp_path / "x.html").exists()


@pytest.mark.filterwarnings("ignore:ResNetPreTrainedModel does not support:regard.RegardWarning")
def test_a_given_grid_and_the_pixels_that_were_read(cat: Path, tmp_path: Path) -> None:
    """With `grid=` the scene has the picture as DETR saw it, and heat on 4 × 8 patches."""
    processor = transformers.DetrImageProcessorPil(size={"height": 32, "width": 64})
    inputs = processor(images=Image.open(cat), return_tensors="pt")
    with torch.no_grad(), regard.capture(model := detr().eval(), grid=(4, 8), tokenizer=processor) as seen:
        model(**inputs)
    scene = next(scene for scene in scenes_of(seen) if scene.grids)
    (grid,) = scene.grids
    resized = np.asarray(Image.fromarray(PIXELS).resize((64, 32), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(grid.picture, resized)
    assert (grid.rows, grid.columns, grid.tokens.tolist()) == (4, 8, list(range(32)))


def test_what_image_does_not_go_with(vit: Path, cat: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = transformers.ViTModel.from_pretrained(vit)
    processor = transformers.AutoImageProcessor.from_pretrained(vit)
    with pytest.raises(TypeError, match="a model needs its processor to read a picture"):
        scenes_of(model, image=cat)
    with pytest.raises(TypeError, match="a picture needs a processor of transformers that reads pictures, got int"):
        scenes_of(model, image=cat, tokenizer=3)
    with pytest.raises(ValueError, match=r"ViTImageProcessor\w* does not take this picture and text: it reads no text"):
        scenes_of(model, image=cat, text="what", tokenizer=processor)
    with pytest.raises(TypeError, match="image goes with a capture, or with a PyTorch model"):
        scenes_of(image=cat)
    (tmp_path / "no.png").write_text("no picture")
    for given, message in (
        (["--image", str(cat)], "--image goes with --model"),
        (["--model", str(vit), "--image", str(tmp_path / "no.png")], "is no picture that Pillow can read"),
        (["--model", str(vit), "--image", str(tmp_path / "none.png")], "No such file"),
        (["--model", str(vit), "--text", "what"], "Give it a picture: regard look --model ... --image cat.png"),
    ):
        assert main(["look", *given, "--save", str(tmp_path / "x.html")]) != 0
        assert message in " ".join(capsys.readouterr().err.split())
