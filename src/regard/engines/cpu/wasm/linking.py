"""A linker for WebAssembly, from one object to a module without imports.

LLVM's object imports its memory and its stack pointer, and leaves addresses open. Linking places the data, reserves a
stack after it, writes the addresses into code and data, and exports functions.

    0         1,024       stack         heap
    | nothing | data      | 64 KiB, ↓   | the caller's

What an object of several functions without imports needs is here, and nothing else: no tables, threads, or dynamic
linking. A relocation or an import of another sort raises ValueError.

Sources: the WebAssembly core specification, "Binary Format"; the tool conventions,
https://github.com/WebAssembly/tool-conventions/blob/main/Linking.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAGIC = b"\0asm\1\0\0\0"
PAGE = 2**16
DATA_START = 1024  # so that no address is 0
STACK = 2**16

# Sections of a module, in their order.
CUSTOM, TYPE, IMPORT, FUNCTION, MEMORY, GLOBAL, EXPORT, CODE, DATA = 0, 1, 2, 3, 5, 6, 7, 10, 11
FUNCTIONS, TABLES, MEMORIES, GLOBALS = range(4)  # sorts of imports and exports
I32, CONST, END = 0x7F, 0x41, 0x0B  # a value type; the instructions i32.const and end

SYMBOL_TABLE, SEGMENT_INFO = 8, 5  # subsections of "linking"
SYMBOL_FUNCTION, SYMBOL_DATA, SYMBOL_GLOBAL, SYMBOL_SECTION, SYMBOL_TABLE_OF_FUNCTIONS = 0, 1, 2, 3, 5
IMPORTED_AS = {SYMBOL_FUNCTION: FUNCTIONS, SYMBOL_GLOBAL: GLOBALS, SYMBOL_TABLE_OF_FUNCTIONS: TABLES}
UNDEFINED, EXPLICIT_NAME = 0x10, 0x40  # flags of a symbol

# Relocations, by their number: the bytes that they fill, and how.
FUNCTION_INDEX, ADDRESS_UNSIGNED, ADDRESS_SIGNED, ADDRESS_I32, TYPE_INDEX, GLOBAL_INDEX = 0, 3, 4, 5, 6, 7
ADDRESSES = (ADDRESS_UNSIGNED, ADDRESS_SIGNED, ADDRESS_I32)


def unsigned(x: int, width: int = 1) -> bytes:
    """Encode a number in LEB128, in `width` bytes at least."""
    encoded = bytearray()
    while x >= 0x80 or len(encoded) < width - 1:
        encoded.append(x & 0x7F | 0x80)
        x >>= 7
    return bytes([*encoded, x])


def signed(x: int, width: int = 1) -> bytes:
    """Encode a number in signed LEB128, in `width` bytes at least."""
    encoded = bytearray()
    while not -0x40 <= x < 0x40 or len(encoded) < width - 1:
        encoded.append(x & 0x7F | 0x80)
        x >>= 7
    return bytes([*encoded, x & 0x7F])


def vector(entries: Sequence[bytes]) -> bytes:
    return unsigned(len(entries)) + b"".join(entries)


def constant(x: int) -> bytes:
    """Return the expression of a constant."""
    return bytes([CONST]) + signed(x) + bytes([END])


def named(name: str) -> bytes:
    text = name.encode()
    return unsigned(len(text)) + text


def section(number: int, body: bytes) -> bytes:
    return bytes([number]) + unsigned(len(body)) + body


def custom_section(name: str, body: bytes) -> bytes:
    """Return a section that programs ignore, and pages can read by its name."""
    return section(CUSTOM, named(name) + body)


class Reader:
    """A cursor over encoded bytes."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def __bool__(self) -> bool:
        return self.at < len(self.data)

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def bytes(self, count: int) -> bytes:
        self.at += count
        return self.data[self.at - count : self.at]

    def unsigned(self) -> int:
        number = shift = 0
        while True:
            x = self.byte()
            number |= (x & 0x7F) << shift
            shift += 7
            if x < 0x80:
                return number

    def signed(self) -> int:
        start = self.at
        number, bits = self.unsigned(), 7 * (self.at - start)
        return number - (1 << bits) if number >> (bits - 1) else number

    def name(self) -> str:
        return self.bytes(self.unsigned()).decode()


def sections(module: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the body of each section.

    Raises ValueError for what is no WebAssembly.
    """
    if not module.startswith(MAGIC):
        raise ValueError("this is no WebAssembly")
    reader = Reader(module[len(MAGIC) :])
    while reader:
        number = reader.byte()
        yield number, reader.bytes(reader.unsigned())


@dataclass(frozen=True)
class Symbol:
    """A name of an object.

    index: of the function, global or data segment that it names. offset: in the segment.
    """

    sort: int
    name: str
    defined: bool
    index: int
    offset: int = 0


@dataclass(frozen=True)
class Relocation:
    """A place in a section that waits for an index or an address.

    place: bytes from the start of the section's body. index: of a symbol, or of a type.
    """

    sort: int
    place: int
    index: int
    addend: int = 0


class RelocatableObject:
    """The parts of an object that linking needs."""

    def __init__(self, code: bytes):
        self.bodies: dict[int, bytes] = {}
        self.imports: list[tuple[str, int]] = []  # names and sorts
        self.segments: list[bytes] = []
        self.alignments: list[int] = []  # bytes, of each segment
        self.symbols: list[Symbol] = []
        self.relocations: dict[int, list[Relocation]] = {}  # by the number of the section
        numbers = []  # relocations name sections by their place in the file
        for number, body in sections(code):
            numbers.append(number)
            if number != CUSTOM:
                self.bodies[number] = body
                continue
            reader = Reader(body)
            name = reader.name()
            if name == "linking":
                self._linking(reader)
            elif name.startswith("reloc."):
                self._relocations(reader, numbers)
        self._data()

    def _linking(self, reader: Reader) -> None:
        self._imports()
        version = reader.unsigned()
        if version != 2:
            raise ValueError(f"this linker reads objects of version 2, got {version}")
        while reader:
            number, body = reader.byte(), Reader(reader.bytes(reader.unsigned()))
            if number == SYMBOL_TABLE:
                self.symbols = [self._symbol(body) for _ in range(body.unsigned())]
            elif number == SEGMENT_INFO:
                for _ in range(body.unsigned()):
                    body.name()
                    self.alignments.append(1 << body.unsigned())
                    body.unsigned()

    def _imports(self) -> None:
        reader = Reader(self.bodies.get(IMPORT, b"\0"))
        for _ in range(reader.unsigned()):
            reader.name()
            name, sort = reader.name(), reader.byte()
            self.imports.append((name, sort))
            if sort == FUNCTIONS:
                reader.unsigned()
            elif sort == GLOBALS:
                reader.bytes(2)
            else:  # a memory's limits; those of a table follow its type
                reader.bytes(sort == TABLES)
                for _ in range(1 + reader.byte() % 2):
                    reader.unsigned()

    def _symbol(self, reader: Reader) -> Symbol:
        sort, flags = reader.byte(), reader.unsigned()
        defined = not flags & UNDEFINED
        if sort == SYMBOL_SECTION:
            return Symbol(sort, "", defined, reader.unsigned())
        if sort == SYMBOL_DATA:
            name = reader.name()
            if not defined:
                return Symbol(sort, name, defined, 0)
            index, offset, _ = (reader.unsigned() for _ in range(3))
            return Symbol(sort, name, defined, index, offset)
        index = reader.unsigned()
        if defined or flags & EXPLICIT_NAME:
            return Symbol(sort, reader.name(), defined, index)
        alike = [name for name, imported in self.imports if imported == IMPORTED_AS[sort]]
        return Symbol(sort, alike[index], defined, index)

    def _relocations(self, reader: Reader, numbers: list[int]) -> None:
        number = numbers[reader.unsigned()]
        relocations = self.relocations[number] = []
        for _ in range(reader.unsigned()):
            sort, place, index = reader.byte(), reader.unsigned(), reader.unsigned()
            if number == CUSTOM:
                return  # of debugging
            if sort not in (FUNCTION_INDEX, TYPE_INDEX, GLOBAL_INDEX, *ADDRESSES):
                raise ValueError(f"this linker has no relocation of type {sort}")
            relocations.append(Relocation(sort, place, index, reader.signed() if sort in ADDRESSES else 0))

    def _data(self) -> None:
        reader = Reader(self.bodies.get(DATA, b"\0"))
        self.places = []  # of each segment's first byte in the section's body
        for _ in range(reader.unsigned()):
            if reader.unsigned() or reader.byte() != CONST:
                raise ValueError("this linker takes data at constant addresses alone")
            reader.signed()
            reader.byte()
            size = reader.unsigned()
            self.places.append(reader.at)
            self.segments.append(reader.bytes(size))


def linked(code: bytes, exports: Sequence[str]) -> bytes:
    """Return the module of an object's functions.

    Exports are the functions by name, "memory", and "__heap_base", the first address that is free. Raises ValueError
    for an object that needs a function from elsewhere.
    """
    object = RelocatableObject(code)
    missing = sorted(name for name, sort in object.imports if sort == FUNCTIONS)
    if missing:
        raise ValueError(f"WebAssembly has no C library, which {', '.join(missing)} would come from")
    unknown = sorted(name for name, sort in object.imports if sort == GLOBALS and name != "__stack_pointer")
    unknown += sorted(x.name for x in object.symbols if x.sort == SYMBOL_DATA and not x.defined)
    if unknown:
        raise ValueError(f"this linker does not know {', '.join(unknown)}")

    addresses, end = [], DATA_START
    for segment, alignment in zip(object.segments, object.alignments, strict=True):
        end = -(-end // alignment) * alignment
        addresses.append(end)
        end += len(segment)
    heap = -(-end // 16) * 16 + STACK

    relocated = {number: _relocated(object, number, addresses) for number in (CODE, DATA)}
    data = [
        b"\0" + constant(address) + unsigned(len(segment)) + relocated[DATA][at : at + len(segment)]
        for address, segment, at in zip(addresses, object.segments, object.places, strict=True)
    ]
    index_of = {x.name: x.index for x in object.symbols if x.sort == SYMBOL_FUNCTION and x.defined}
    exported = [(name, FUNCTIONS, index_of[name]) for name in exports]
    exported += [("memory", MEMORIES, 0), ("__heap_base", GLOBALS, 1)]
    bodies = {
        TYPE: object.bodies[TYPE],
        FUNCTION: object.bodies[FUNCTION],
        MEMORY: vector([b"\0" + unsigned(-(-heap // PAGE))]),
        GLOBAL: vector([bytes([I32, mutable]) + constant(heap) for mutable in (1, 0)]),  # stack pointer, heap base
        EXPORT: vector([named(name) + bytes([sort]) + unsigned(index) for name, sort, index in exported]),
        CODE: relocated[CODE],
    } | ({DATA: vector(data)} if data else {})
    return MAGIC + b"".join(section(number, body) for number, body in bodies.items())


def _relocated(made: RelocatableObject, number: int, addresses: Sequence[int]) -> bytes:
    """Return the body of a section with its relocations filled in.

    Each has five bytes of LEB128, or four of a plain integer, whatever the number: nothing moves.
    """
    body = bytearray(made.bodies.get(number, b""))
    for x in made.relocations.get(number, []):
        if x.sort == TYPE_INDEX:
            filled = unsigned(x.index, 5)
        elif x.sort in ADDRESSES:
            symbol = made.symbols[x.index]
            address = addresses[symbol.index] + symbol.offset + x.addend
            filled = {
                ADDRESS_UNSIGNED: unsigned(address, 5),
                ADDRESS_SIGNED: signed(address, 5),
                ADDRESS_I32: address.to_bytes(4, "little"),
            }[x.sort]
        else:  # functions and globals keep their indices: the stack pointer is the only global, and is the first
            filled = unsigned(made.symbols[x.index].index, 5)
        body[x.place : x.place + len(filled)] = filled
    return bytes(body)
