"""Values of a kernel: registers, variables, addresses, induction variables."""

from typing import TYPE_CHECKING, Any

from llvmlite import ir

from regard.engines.cpu.language.types import BF16, BOOL, F32, I8, I16, I32, I64, Type

if TYPE_CHECKING:
    from regard.engines.cpu.language.kernel import Kernel

INDEXED = {type.size: type for type in (I8, I16, I32, I64)}  # scales that an address takes for an index register


class _Splat(ir.FormattedConstant):  # type: ignore[misc]
    """A vector of one constant, written once.

    Lane by lane, constants were half of a kernel's text.
    """

    def __init__(self, vector: Any, one: Any):
        self.type, self.constant = vector, f"splat ({one.type} {one.get_reference()})"


class Value:
    """A scalar or a vector in a register.

    Comparisons give booleans, for `&` `|` `~` and `k.where`.
    """

    __slots__ = ("k", "lanes", "raw", "type")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, k: "Kernel", type: Type, lanes: int, raw: Any):
        self.k, self.type, self.lanes, self.raw = k, type, lanes, raw

    def __bool__(self) -> bool:
        raise TypeError("a value of a kernel is not known while it is written: use k.when, k.where, & and |")

    def _meet(self, other: Any) -> tuple["Value", "Value"]:
        """Broadcast both operands to one type and number of lanes."""
        if not isinstance(other, Value):
            other = self.k.constant(self.type, other)
        if other.type is not self.type:
            raise TypeError(f"{self.type} meets {other.type}: convert one of them")
        lanes = max(self.lanes, other.lanes)
        return self.spread(lanes), other.spread(lanes)

    def _operate(self, other: Any, name: dict[str, str], swap: bool = False) -> "Value":
        x, y = self._meet(other)
        x, y = (y, x) if swap else (x, y)
        return x._like(getattr(x.k.b, name[x.type.category])(x.raw, y.raw))

    def _like(self, raw: Any) -> "Value":
        return Value(self.k, self.type, self.lanes, raw)

    def spread(self, lanes: int) -> "Value":
        """Broadcast a scalar to all lanes."""
        if self.lanes == lanes:
            return self
        if self.lanes:
            raise TypeError(f"{self.lanes} lanes meet {lanes}")
        vector = ir.VectorType(self.type.raw, lanes)
        if isinstance(self.raw, ir.Constant):
            return Value(self.k, self.type, lanes, _Splat(vector, self.raw))
        undefined = ir.Constant(vector, ir.Undefined)
        one = self.k.b.insert_element(undefined, self.raw, ir.Constant(I32.raw, 0))
        zeros = ir.Constant(ir.VectorType(I32.raw, lanes), [0] * lanes)
        return Value(self.k, self.type, lanes, self.k.b.shuffle_vector(one, undefined, zeros))

    def __add__(self, other: Any) -> "Value":
        return self._operate(other, {"float": "fadd", "int": "add"})

    def __sub__(self, other: Any) -> "Value":
        return self._operate(other, {"float": "fsub", "int": "sub"})

    def __rsub__(self, other: Any) -> "Value":
        return self._operate(other, {"float": "fsub", "int": "sub"}, swap=True)

    def __mul__(self, other: Any) -> "Value":
        return self._operate(other, {"float": "fmul", "int": "mul"})

    def __truediv__(self, other: Any) -> "Value":
        return self._operate(other, {"float": "fdiv"})

    def __rtruediv__(self, other: Any) -> "Value":
        return self._operate(other, {"float": "fdiv"}, swap=True)

    def __floordiv__(self, other: Any) -> "Value":
        """Divide integers, rounded towards zero; undefined for a divisor of 0."""
        return self._operate(other, {"int": "sdiv"})

    def __mod__(self, other: Any) -> "Value":
        """Return the remainder of `//`, which has the sign of the dividend."""
        return self._operate(other, {"int": "srem"})

    def __and__(self, other: Any) -> "Value":
        return self._operate(other, {"int": "and_", "bool": "and_"})

    def __or__(self, other: Any) -> "Value":
        return self._operate(other, {"int": "or_", "bool": "or_"})

    def __xor__(self, other: Any) -> "Value":
        return self._operate(other, {"int": "xor", "bool": "xor"})

    def __lshift__(self, other: Any) -> "Value":
        return self._operate(other, {"int": "shl"})

    def __rshift__(self, other: Any) -> "Value":
        """Shift right arithmetically: the sign stays."""
        return self._operate(other, {"int": "ashr"})

    def logical_shift(self, bits: Any) -> "Value":
        """Shift right, with zeros shifted in."""
        return self._operate(bits, {"int": "lshr"})

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self) -> "Value":
        return self._like(self.k.b.fneg(self.raw) if self.type.category == "float" else self.k.b.neg(self.raw))

    def __invert__(self) -> "Value":
        return self._like(self.k.b.not_(self.raw))

    def _compare(self, other: Any, relation: str) -> "Value":
        x, y = self._meet(other)
        b = x.k.b
        if x.type.category == "float":
            compare = b.fcmp_unordered if relation == "!=" else b.fcmp_ordered
        else:
            compare = b.icmp_signed if x.type.category == "int" else b.icmp_unsigned
        return Value(x.k, BOOL, x.lanes, compare(relation, x.raw, y.raw))

    def __lt__(self, other: Any) -> "Value":
        return self._compare(other, "<")

    def __le__(self, other: Any) -> "Value":
        return self._compare(other, "<=")

    def __gt__(self, other: Any) -> "Value":
        return self._compare(other, ">")

    def __ge__(self, other: Any) -> "Value":
        return self._compare(other, ">=")

    def __eq__(self, other: Any) -> "Value":  # type: ignore[override]
        return self._compare(other, "==")

    def __ne__(self, other: Any) -> "Value":  # type: ignore[override]
        return self._compare(other, "!=")

    def below(self, other: Any) -> "Value":
        """Compare integers as unsigned: self < other."""
        x, y = self._meet(other)
        return Value(x.k, BOOL, x.lanes, x.k.b.icmp_unsigned("<", x.raw, y.raw))

    def is_nan(self) -> "Value":
        return self != self

    def to(self, type: Type) -> "Value":
        """Convert to a type.

        Floats are rounded; to integers they truncate, saturate, and give 0 for NaN.
        """
        if type is self.type:
            return self
        b, raw = self.k.b, self.k.raw(type, self.lanes)
        categories = self.type.category, type.category
        if categories == ("float", "float"):
            if type is BF16 and self.type is F32:
                return self._to_bfloat()
            if type is BF16:
                return self.to(F32).to(type)
            if self.type.size == type.size:
                return self.to(F32).to(type)
            converted = b.fpext(self.raw, raw) if type.size > self.type.size else b.fptrunc(self.raw, raw)
        elif categories == ("int", "int"):
            converted = b.sext(self.raw, raw) if type.size > self.type.size else b.trunc(self.raw, raw)
        elif categories == ("int", "float"):
            converted = b.sitofp(self.raw, raw)
        elif categories == ("bool", "int"):
            converted = b.zext(self.raw, raw)
        elif categories == ("bool", "float"):
            converted = b.uitofp(self.raw, raw)
        elif type.category == "bool":
            return self != 0
        else:
            return self.k.intrinsic("fptosi.sat", type, self)
        return Value(self.k, type, self.lanes, converted)

    def _to_bfloat(self) -> "Value":
        """Round to the upper half, ties to even.

        Few processors have an instruction for it, and that one flushes subnormals.
        """
        word = self.bits(I32)
        rounded = (word + ((word.logical_shift(16) & 1) + 0x7FFF)).logical_shift(16)
        quiet = word.logical_shift(16) | 0x40
        return self.k.where(self.is_nan(), quiet, rounded).to(I16).bits(BF16)

    def bits(self, type: Type) -> "Value":
        """Reinterpret the bits as another type.

        A type of another size changes the number of lanes.
        """
        lanes = self.lanes * self.type.size // type.size
        return Value(self.k, type, lanes, self.k.b.bitcast(self.raw, self.k.raw(type, lanes)))

    def lane(self, n: int) -> "Value":
        return Value(self.k, self.type, 0, self.k.b.extract_element(self.raw, ir.Constant(I32.raw, n)))

    def with_lane(self, n: int, x: "Value") -> "Value":
        return self._like(self.k.b.insert_element(self.raw, x.raw, ir.Constant(I32.raw, n)))

    def any(self) -> "Value":
        """Test a boolean in any lane."""
        if not self.lanes:
            return self
        word = Value(self.k, BOOL, 0, self.k.b.bitcast(self.raw, ir.IntType(self.lanes)))
        return Value(self.k, BOOL, 0, self.k.b.icmp_unsigned("!=", word.raw, ir.Constant(word.raw.type, 0)))


def _is_integer(x: Any) -> bool:
    return isinstance(x, Value) and x.type is I64 and not x.lanes


class Count(Value):
    """A loop's index times a factor, plus an offset, perhaps times a loop invariant.

    by: the loop invariant. The product is an induction variable: it costs an addition. LLVM could find that out too, in
    half of its time.
    """

    __slots__ = ("by", "factor", "loop", "rest")

    def __init__(self, loop: "Loop", factor: int = 1, rest: int = 0, by: Value | None = None):
        self.k, self.type, self.lanes = loop.k, I64, 0
        self.loop, self.factor, self.rest, self.by = loop, factor, rest, by

    @property
    def raw(self) -> Any:
        grown = self.loop.grown(self.factor, self.by)
        return self.k.b.add(grown, self.k.whole(self.apart).raw) if self.rest else grown

    @property
    def apart(self) -> Value | int:
        """The part to add to the induction variable."""
        return self.loop.fixed(self.rest, self.by) if self.rest and self.by is not None else self.rest

    def __add__(self, other: Any) -> Value:
        if isinstance(other, int) and self.by is None:
            return Count(self.loop, self.factor, self.rest + other)
        return Sum(self, other) if _is_integer(other) else super().__add__(other)

    def __sub__(self, other: Any) -> Value:
        return self + -other if isinstance(other, int) else super().__sub__(other)

    def __mul__(self, other: Any) -> Value:
        if isinstance(other, int):
            return Count(self.loop, self.factor * other, self.rest * other, self.by)
        if self.by is None and _is_integer(other):
            other = Value(self.k, I64, 0, other.raw)  # evaluated once, if it is a count or a sum
            if self.loop.follows(other.raw):
                return Count(self.loop, self.factor, self.rest, other)
        return super().__mul__(other)

    __radd__, __rmul__ = __add__, __mul__


class Sum(Value):
    """A count and an offset, added to an address one after the other."""

    __slots__ = ("terms",)

    def __init__(self, x: Value, y: Value):
        self.k, self.type, self.lanes, self.terms = x.k, I64, 0, (x, y)

    @property
    def raw(self) -> Any:
        return self.k.b.add(*(x.raw for x in self.terms))

    def __add__(self, other: Any) -> Value:
        return Sum(self.terms[0], self.terms[1] + other) if isinstance(other, int) else super().__add__(other)

    def __mul__(self, other: Any) -> Value:
        return Sum(*(x * other for x in self.terms)) if isinstance(other, int) else super().__mul__(other)

    __radd__, __rmul__ = __add__, __mul__


class Loop:
    """The blocks of a loop, its induction variables, and its invariants."""

    def __init__(self, k: "Kernel", start: Value, step: Value):
        self.k, self.start, self.step = k, start, step
        self.earlier = set(map(id, k.function.basic_blocks))
        self.enter, self.body, self.done = (k.function.append_basic_block(x) for x in ("enter", "body", "done"))
        self.growing: dict[Any, tuple[Any, Any, Any]] = {}
        self.once: dict[Any, Value] = {}

    def follows(self, raw: Any) -> bool:
        """Return whether a value was computed before the loop."""
        return isinstance(raw, ir.Instruction) and id(raw.parent) in self.earlier

    def grown(self, factor: int = 1, by: Value | None = None, base: Any = None) -> Any:
        """Return the induction variable for index · factor · by.

        base: an address; the result is then that many bytes from it.
        """
        b, key = self.k.b, (factor, None if by is None else by.raw, base)
        if key not in self.growing:
            grow = b.add if base is None else self.k.address_after
            with self.k.inside(self.enter):
                first, step = (self._scaled(x, factor, by).raw for x in (self.start, self.step))
                if base is not None:
                    first = grow(base, first)
            with self.k.inside(self.body):
                b.position_at_start(self.body)
                now = b.phi(first.type)
            now.add_incoming(first, self.enter)
            self.growing[key] = now, step, grow
        return self.growing[key][0]

    def fixed(self, x: int, by: Value) -> Value:
        """Return a product that is the same in every iteration."""
        if (x, by.raw) not in self.once:
            with self.k.inside(self.enter):
                self.once[x, by.raw] = by * x
        return self.once[x, by.raw]

    def _scaled(self, x: Value, factor: int, by: Value | None) -> Value:
        x = x if factor == 1 else x * factor
        return x if by is None else x * by

    def end(self) -> list[Any]:
        """Advance all induction variables to the next iteration."""
        grown = [grow(now, step) for now, step, grow in self.growing.values()]
        for (now, _, _), then in zip(self.growing.values(), grown, strict=True):
            now.add_incoming(then, self.k.b.block)
        return grown


class Variable:
    """A mutable scalar or vector in a register."""

    def __init__(self, k: "Kernel", first: Value):
        self.k, self.type, self.lanes = k, first.type, first.lanes
        with k.inside(k.entry):
            self.slot = k.b.alloca(first.raw.type)
        self.value = first

    @property
    def value(self) -> Value:
        raw = self.k.b.load(self.slot, typ=self.k.raw(self.type, self.lanes))
        return Value(self.k, self.type, self.lanes, raw)

    @value.setter
    def value(self, new: Value) -> None:
        new = new.spread(self.lanes)
        if new.type is not self.type:
            raise TypeError(f"a variable of {self.type} is set to {new.type}")
        self.k.b.store(new.raw, self.slot)


class Pointer:
    """An address of numbers of one type.

    `p[n]` is the n-th number, `p + n` its address.
    """

    def __init__(self, k: "Kernel", type: Type, base: Any, offset: int = 0):
        self.k, self.type, self.base, self.offset = k, type, base, offset  # bytes, part of the load's addressing

    @property
    def raw(self) -> Any:
        return self.k.address_after(self.base, self.k.whole(self.offset).raw) if self.offset else self.base

    def __add__(self, n: Any) -> "Pointer":
        if isinstance(n, Sum):
            x, y = n.terms
            return self + x + y
        return self.bytes(n * self.type.size) if isinstance(n, int | Count) else self._on(n, self.type)

    def bytes(self, n: Any) -> "Pointer":
        """Return the address n bytes further."""
        if isinstance(n, Sum):
            x, y = n.terms
            return self.bytes(x).bytes(y)
        if isinstance(n, int):
            return Pointer(self.k, self.type, self.base, self.offset + n)
        if not isinstance(n, Count):
            return self._on(n, I8)
        if n.by is None and n.factor in INDEXED:
            moved = self._on(Count(n.loop), INDEXED[n.factor])
        elif n.loop.follows(self.base):
            moved = Pointer(self.k, self.type, n.loop.grown(n.factor, n.by, self.base), self.offset)
        else:
            moved = self._on(Count(n.loop, n.factor, 0, n.by), I8)
        return moved.bytes(n.apart)

    def _on(self, n: Value, element: Type) -> "Pointer":
        return Pointer(self.k, self.type, self.k.address_after(self.base, n.raw, element), self.offset)

    def of(self, type: Type) -> "Pointer":
        """Return the same address as a pointer to another type."""
        return Pointer(self.k, type, self.base, self.offset)

    @property
    def address(self) -> Value:
        return Value(self.k, I64, 0, self.k.b.ptrtoint(self.raw, I64.raw))

    def __getitem__(self, n: Any) -> Value:
        return self.load(n)

    def __setitem__(self, n: Any, value: Value) -> None:
        """Store a scalar at n, or a vector from n on."""
        self.k.b.store(value.raw, (self + n).raw, align=self.type.size)

    def fetch_add(self, value: Value) -> Value:
        """Add to the number atomically, and return its former value."""
        raw = self.k.b.atomic_rmw("add", self.raw, value.raw, "monotonic")
        return Value(self.k, self.type, 0, raw)

    def stream(self, value: Value) -> None:
        """Store an aligned vector past the caches; other threads see it after a `fence`."""
        stored = self.k.b.store(value.raw, self.raw, align=value.lanes * self.type.size)
        stored.set_metadata("nontemporal", self.k.module.add_metadata([I32.raw(1)]))

    def load(self, n: Any = 0, lanes: int = 0) -> Value:
        """Load the n-th number, or a vector of `lanes` from n on."""
        raw = self.k.raw(self.type, lanes)
        return Value(self.k, self.type, lanes, self.k.b.load((self + n).raw, align=self.type.size, typ=raw))

    def load_first(self, count: Any, lanes: int) -> Value:
        """Load the first `count` lanes of a vector; the others are 0."""
        k = self.k
        mask = k.lane_numbers(I32, lanes) < k.whole(count).to(I32)
        raw, zero = k.raw(self.type, lanes), k.constant(self.type, 0).spread(lanes)
        types = [ir.PointerType(), mask.raw.type, raw]
        name = f"llvm.masked.load.v{lanes}{self.type}.p0"
        return Value(k, self.type, lanes, k.call_named(name, raw, types, [self.raw, mask.raw, zero.raw]))

    def prefetch(self, level: int = 1) -> None:
        """Prefetch the cache line at this address to a level of caches.

        The address need not be valid.
        """
        arguments = [ir.Constant(I32.raw, x) for x in (0, 4 - level, 1)]
        types = [ir.PointerType(), *(x.type for x in arguments)]
        self.k.call_named("llvm.prefetch.p0", ir.VoidType(), types, [self.raw, *arguments])

    def gather(self, index: Value) -> Value:
        """Load the numbers at a vector of indices."""
        k, lanes = self.k, index.lanes
        if not lanes:
            return self[index]
        pointers = k.address_after(self.raw, index.raw, self.type)
        # llvmlite takes the type of an address from its base; a vector of indices gives a vector of addresses.
        pointers.type = ir.VectorType(ir.PointerType(), lanes)
        raw = k.raw(self.type, lanes)
        everywhere = ir.Constant(ir.VectorType(BOOL.raw, lanes), [True] * lanes)
        arguments = [pointers, everywhere, ir.Constant(raw, ir.Undefined)]
        name = f"llvm.masked.gather.v{lanes}{self.type}.v{lanes}p0"
        return Value(k, self.type, lanes, k.call_named(name, raw, [x.type for x in arguments], arguments))
