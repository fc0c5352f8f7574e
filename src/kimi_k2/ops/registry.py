"""Which implementation an operation uses: the first entry of an explicit order that takes the arguments.

A plain function becomes an operation with `@operation`. It is the last entry of its operation, always, so that the
model runs on every device. Kernels add entries before it with `Operation.entry`; they are imported when an operation
first gets a CUDA tensor, so Triton and nvcc are not needed elsewhere. An operation that joins others (say, a norm and
a linear) is an operation too, with a composition of them as its plain function.

`KIMI_K2_KERNELS=op=name,op=name` (or `pin`) fixes a choice; `plain` pins the plain function, of all operations where it
stands alone or after `*=`. A pinned operation is not joined with others by an entry that does its work otherwise.

A model computes in a mode of its own, which its steps enter (`computing`). In batch-invariant mode only entries serve
that say why a row's bits do not depend on how many rows there are, on its place or on the others; a call that none of
them takes is refused. An entry may choose its launch otherwise then: `batch_invariant()` tells it, and `is_decoding()`
whether the call belongs to a decode step, whose arithmetic need not be a prompt's: no token passes through both.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

from kimi_k2.errors import KernelError

ENVIRONMENT = "KIMI_K2_KERNELS"
PLAIN = "plain"
ALL = "*"
# Modules whose import adds entries: ours, and those that other packages name in this group of entry points.
PROVIDERS = ("kimi_k2.kernels.entries",)
PROVIDER_GROUP = "kimi_k2.kernels"

# Why a row's bits depend on nothing but the row: reasons that several entries share.
ELEMENTWISE = "every value by itself"
COMPOSED = "calls other operations"
BY_ROW = "every row by itself, summed in an order that its length gives"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(eq=False, slots=True)
class Entry:
    """One implementation of an operation.

    Attributes:
        name: what pins and `explain` call it.
        call: the function, with the plain function's arguments.
        takes: whether it takes such arguments: shapes, dtypes, device.
        prepare: puts weights into the order that `call` wants, once after loading; see `Operation.prepare`.
        joins: name of the entry, by operation, whose work is part of this entry's; "" where no entry does that part, so
            that any pin of the operation bars this one. Checked once all providers are loaded.
        optional: taken only where it, or one of `joins`, is pinned: it trades accuracy away.
        batch_invariant: why a row's bits do not depend on the batch in batch-invariant mode; empty where they may.
        calls: how often it was chosen.
    """

    name: str
    call: Callable[..., Any]
    takes: Callable[..., bool]
    prepare: Callable[..., Any] | None = None
    joins: Mapping[str, str] = field(default_factory=dict)
    optional: bool = False
    batch_invariant: str = ""
    calls: int = 0


class Operation(Generic[P, R]):
    """A function with several implementations. Its first argument, a tensor, says on which device the call runs.

    Attributes:
        name: of the plain function.
        plain: the last entry.
        entries: those before it, in the order of preference.
    """

    def __init__(self, plain: Callable[P, R], batch_invariant: str = "") -> None:
        functools.update_wrapper(self, plain)
        self.name = plain.__name__
        self.plain = Entry(PLAIN, plain, lambda *_, **__: True, batch_invariant=batch_invariant)
        self.entries: list[Entry] = []
        self._allowed: dict[bool, tuple[Entry, ...]] = {}  # by whether the mode is batch-invariant
        self._pin: str | None = None

    @property
    def names(self) -> list[str]:
        """The entries' names in their order, the plain function's last."""
        return [*(entry.name for entry in self.entries), PLAIN]

    def __call__(self, *arguments: P.args, **keywords: P.kwargs) -> R:
        """Call the entry that `choose` gives for these arguments."""
        chosen = self.choose(*arguments, **keywords)
        chosen.calls += 1
        result: R = chosen.call(*arguments, **keywords)
        return result

    def choose(self, *arguments: P.args, **keywords: P.kwargs) -> Entry:
        """The entry for this call.

        Raises:
            KernelError: the pinned entry does not take these arguments; none does in batch-invariant mode; a provider
                of entries cannot be imported.
        """
        if not arguments[0].is_cuda:  # type: ignore[attr-defined]
            return self.plain
        if not _loaded:
            load_providers()
        invariant = batch_invariant()
        for entry in self._allowed[invariant]:
            if entry.takes(*arguments, **keywords):
                return entry
        if self._pin not in (None, PLAIN):
            raise KernelError(
                f"{self.name}={self._pin} is pinned, but does not take these shapes, dtypes or this device"
                + (", or is not batch-invariant" if invariant else "")
            )
        if invariant and not self.plain.batch_invariant:
            raise KernelError(
                f"batch-invariant mode: no entry of {self.name} that keeps a row's bits takes {_described(arguments)}"
            )
        return self.plain

    def entry(
        self,
        name: str,
        *,
        takes: Callable[..., bool],
        before: str | None = None,
        **options: Any,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Add the decorated function to the table.

        Args:
            name: of the entry, unique in its operation.
            takes: whether the function takes such arguments.
            before: the entry that it comes before; None for the last place before the plain function.
            options: joins, prepare, optional, batch_invariant: see `Entry`.

        Raises:
            KernelError: the operation has an entry of this name, or none called `before`.
        """
        if name in self.names:
            raise KernelError(f"{self.name} has an entry {name} already")
        if before is not None and before not in self.names:
            raise KernelError(f"{self.name}={name}: there is no entry {before} to come before")
        place = self.names.index(before or PLAIN)

        def add(function: Callable[P, R]) -> Callable[P, R]:
            self.entries.insert(place, Entry(name, function, takes, **options))
            self.allow(_pins)
            return function

        return add

    def prepare(self, *arguments: Any) -> Any:
        """What the first entry that is free to be chosen makes of a module's weights, None if there is nothing to do.

        The arguments are the operation's own affair, see its plain function's module.
        """
        load_providers()
        for entry in self._allowed[batch_invariant()]:
            if entry.prepare is not None and (made := entry.prepare(*arguments)) is not None:
                return made
        return None

    def allow(self, pins: Mapping[str, str]) -> None:
        """Keep the entries that these pins leave free."""
        self._pin = pins.get(self.name, pins.get(ALL))

        def is_free(entry: Entry) -> bool:
            if self._pin is not None:
                return entry.name == self._pin
            pinned = [pins.get(operation) == name for operation, name in entry.joins.items()]
            return all(pins.get(operation, name) == name for operation, name in entry.joins.items()) and (
                not entry.optional or any(pinned)
            )

        free = tuple(filter(is_free, self.entries))
        self._allowed = {False: free, True: tuple(entry for entry in free if entry.batch_invariant)}


TABLE: dict[str, Operation[..., Any]] = {}
_pins: dict[str, str] = {}
_loaded = _pinned = False


@overload
def operation(plain: Callable[P, R], *, batch_invariant: str = "") -> Operation[P, R]: ...
@overload
def operation(*, batch_invariant: str) -> Callable[[Callable[P, R]], Operation[P, R]]: ...
def operation(plain: Callable[P, R] | None = None, *, batch_invariant: str = "") -> Any:
    """Make a plain function an operation, of which it is the last entry.

    Args:
        plain: the function; None for a decorator.
        batch_invariant: see `Entry`, on a GPU; on a CPU every plain function is (`ops.linear`).
    """
    if plain is None:
        return functools.partial(operation, batch_invariant=batch_invariant)
    made = Operation(plain, batch_invariant)
    if made.name in TABLE:
        raise KernelError(f"there is an operation {made.name} already")
    TABLE[made.name] = made
    made.allow(_pins)
    return made


class Mode(NamedTuple):
    """How operations are computed.

    Attributes:
        batch_invariant: a row's bits must not depend on the batch that it is in.
        decoding: a decode step is under way, one new token a sequence.
    """

    batch_invariant: bool = False
    decoding: bool = False


NORMAL = Mode()


class _Thread(threading.local):  # Dynamo reads this, but no ContextVar
    """What runs in a thread."""

    def __init__(self) -> None:
        self.mode = NORMAL


_thread = _Thread()


@contextmanager
def computing(**changed: bool) -> Iterator[None]:
    """Operations called meanwhile, in this thread, are computed in this mode; fields of `Mode` that are left out stay.

    What is captured in a graph stays as it was.
    """
    before = _thread.mode
    _thread.mode = before._replace(**changed)
    try:
        yield
    finally:
        _thread.mode = before


def batch_invariant() -> bool:
    """`Mode.batch_invariant` of the call under way."""
    return _thread.mode.batch_invariant


def is_decoding() -> bool:
    """`Mode.decoding` of the call under way."""
    return _thread.mode.decoding


def _described(arguments: tuple[Any, ...]) -> str:
    """Dtypes and shapes of the tensors among a call's arguments, and the first one's device."""
    tensors = [argument for argument in arguments if hasattr(argument, "is_cuda")]
    shapes = ", ".join(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors)
    return f"{shapes} on {tensors[0].device}"


def load_providers() -> None:
    """Import the modules that add entries, once, and follow the environment's pins unless `pin` was called before.

    Raises:
        KernelError: one of them cannot be imported, an entry joins what is none, or the environment names no entry.
    """
    global _loaded
    if _loaded:
        return
    _loaded = True  # also while they are imported: they may ask the table
    others = (point.value for point in entry_points(group=PROVIDER_GROUP))
    for module in (*PROVIDERS, *others):
        try:
            importlib.import_module(module)
        except ImportError as error:
            _loaded = False
            raise KernelError(f"{module}, which offers kernels, cannot be imported: {error}") from error
    for one in TABLE.values():
        for entry in one.entries:
            for joined, name in entry.joins.items():
                if joined not in TABLE or name not in ("", *TABLE[joined].names):
                    _loaded = False
                    raise KernelError(f"{one.name}={entry.name} joins {joined}={name}, which is no entry")
    if not _pinned:
        pin()


def parse_pins(text: str) -> dict[str, str]:
    """`op=name,op=name` as a dictionary; `plain` alone is `*=plain`.

    Raises:
        KernelError: an operation or a name that the table lacks.
    """
    load_providers()
    pins: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        name, _, chosen = item.partition("=")
        if item in (PLAIN, f"{ALL}={PLAIN}"):
            name, chosen = ALL, PLAIN
        elif name not in TABLE or chosen not in TABLE[name].names:
            known = ", ".join([f"{ALL}={PLAIN}", *(f"{op.name}={'|'.join(op.names)}" for op in TABLE.values())])
            raise KernelError(f"{item!r} is no kernel choice; expected {known}")
        pins[name] = chosen
    return pins


def check_pins_on_cpu() -> None:
    """Raises KernelError if the environment pins anything but plain functions, which are all that a CPU runs."""
    for item in filter(None, os.environ.get(ENVIRONMENT, "").split(",")):
        if item.rpartition("=")[2] != PLAIN:
            raise KernelError(f"{ENVIRONMENT}: a CPU runs the plain functions, it has no {item!r}; expected {PLAIN}")


def pin(text: str | None = None) -> None:
    """Fix the choices in `text`, or those of the environment variable if it is None; others become free again.

    Counts of calls begin anew.

    Raises:
        KernelError: an operation or a name that the table lacks.
    """
    global _pinned
    text = os.environ.get(ENVIRONMENT, "") if text is None else text
    _pinned = True
    pins = parse_pins(text) if text else {}
    _pins.clear()
    _pins.update(pins)
    for one in TABLE.values():
        one.allow(_pins)
        for entry in (*one.entries, one.plain):
            entry.calls = 0


def explain(invariant: bool = False) -> str:
    """One line an operation: which entries were used, how many calls each, and the order of the table.

    Args:
        invariant: the model ran in batch-invariant mode: also why each used entry keeps a row's bits.
    """
    load_providers()
    lines = ["batch-invariant mode"] if invariant else []

    def described(entry: Entry) -> str:
        why = f"; {entry.batch_invariant}" if invariant and entry.batch_invariant else ""
        return f"{entry.name} ({entry.calls} calls{why})"

    for one in TABLE.values():
        used = ", ".join(described(entry) for entry in (*one.entries, one.plain) if entry.calls)
        lines.append(f"{one.name}: {used or 'not called'}; order {' > '.join(one.names)}")
    return "\n".join(lines)
