"""The rules of NKI's language that a kernel's source is held to, by release, and where each is written."""

from __future__ import annotations

from dataclasses import dataclass

RELEASES = ("0.3", "0.4", "0.5", "0.6", "0.7")
ERROR, AGAINST = "error", "documented against, seen in AWS's kernels"
_GUIDE = "aws-neuron-sdk nki/get-started/nki-language-guide.rst"
_MOVE = "aws-neuron-sdk nki/migration/index.rst"
_API = "aws-neuron-sdk nki/api/nki"
_KLR = "klr-lang 0.0.12, gather.c and simplify.c"


@dataclass(frozen=True)
class Rule:
    """What is held.

    Attributes:
        says: the rule.
        source: the document.
        level: ERROR or AGAINST.
        first, last: releases that it holds for.
    """

    says: str
    source: str
    level: str = ERROR
    first: str = "0.3"
    last: str = "0.6"

    def holds(self, release: str) -> bool:
        """Whether it holds for a release."""
        return RELEASES.index(self.first) <= RELEASES.index(release) <= RELEASES.index(self.last)


# Up to 0.6 a compiler parses the kernel; 0.7 runs it as Python, and what is bound to the language falls away.
RULES = {
    "is-operator": Rule("no `is` and `is not`: == and !=", f"{_MOVE}, 0.2 to 0.3", AGAINST),
    "in-operator": Rule("no `in` and `not in`", _KLR, AGAINST),
    "matmul-operator": Rule("no `@`", _KLR),
    "class-base": Rule("a class inherits from NKIObject or Enum and from nothing else", f"{_GUIDE}, Class Support"),
    "super": Rule("no `super()`", f"{_GUIDE}, Class Support"),
    "decorator": Rule("no decorators on methods but staticmethod", f"{_GUIDE}, Class Support"),
    "property": Rule("no properties", f"{_GUIDE}, Class Support", AGAINST),
    "signature": Rule("no `*` in a signature", f"{_MOVE}, 0.2 to 0.3; {_KLR}"),
    "nested-function": Rule("no functions inside functions; from 0.6 on bodies of loops", _KLR, last="0.5"),
    "lambda": Rule("no lambda", _KLR),
    "closure": Rule("no `nonlocal` and `global`: kernels are pure functions", f"{_GUIDE}, Kernel Caching"),
    "comprehension": Rule("no comprehensions and generator expressions", _KLR),
    "container": Rule("tuples, lists and dictionaries are the containers: no sets", f"{_GUIDE}, NKI Values"),
    "dictionary-key": Rule("a dictionary's keys are strings", f"{_GUIDE}, NKI Values"),
    "value": Rule("values are None, booleans, 32-bit integers, floats, strings and tensors", f"{_GUIDE}, NKI Values"),
    "statement": Rule("no `with`, `del`, `yield`, `async`, `match`, `import`, `:=`", _KLR),
    "try": Rule("no `try`", _KLR, AGAINST),
    "raise": Rule("no `raise`: assert", _KLR, AGAINST),
    "loop-else": Rule("no `else` of a loop", _KLR),
    "star": Rule("no starred expressions", _KLR),
    "chained-slice": Rule("no `slice` objects: subscripts", _KLR),
    "builtin": Rule("of Python's builtins those that the guide or AWS's kernels use", _GUIDE),
    "rare-builtin": Rule("of Python's builtins those that the guide shows", _GUIDE, AGAINST),
    "string-buffer": Rule("a buffer is an object of nki.language, no string", f"{_MOVE}, 0.2 to 0.3", last="0.7"),
    "integer-enumeration": Rule("enumerations by their members, no integers", f"{_MOVE}, 0.2 to 0.3", last="0.7"),
    "api-name": Rule("a name that this release has", _API, last="0.7"),
    "api-parameter": Rule("parameters that this release's function has", _API, last="0.7"),
    "jit-platform": Rule("nki.jit takes no platform_target", f"{_MOVE}, 0.2 to 0.3", last="0.7"),
    "jit-mode": Rule("nki.jit leaves `mode` aside", f"{_MOVE}, 0.2 to 0.3", AGAINST, last="0.7"),
    "old-namespace": Rule("no neuronxcc.nki: one NKI a model", f"{_MOVE}, 0.3 to 0.4", first="0.4", last="0.7"),
    "deprecated-loop": Rule("no nl.dynamic_range: fori_loop", f"{_MOVE}, 0.5 to 0.6", AGAINST, "0.6", "0.7"),
    "deprecated-range": Rule("no affine_range and sequential_range: range", f"{_API}/language", AGAINST, last="0.7"),
}  # fmt: skip
