"""From a kernel's source to a function that Python runs.

The text of each function is compiled anew without decorators and annotations, with the names that
it uses replaced: Triton's by those of `language`, functions of kernels by functions made like this,
records by plain classes, constants by their values.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import ModuleType

from triton.language import core
from triton.runtime.jit import ConstexprFunction

from linattn_edu.gluon_interpreter import language
from linattn_edu.gluon_interpreter.machine import MARKER, Record


class Sources:
    """The functions of kernels as Python runs them, each made once.

    changes: (module, what its text has once, what stands there instead): mistakes to plant.
    """

    def __init__(self, changes: tuple[tuple[ModuleType, str, str], ...] = ()):
        self._made: dict[int, object] = {}
        self._substitutes, self._changes = language.substitutes(), changes
        for module, before, _ in changes:
            found = inspect.getsource(module).count(before)
            if found != 1:
                raise ValueError(f"{module.__name__} has {found} times: {before}")
        self._kept = []  # so that an id is one object's alone
        self.unplanted = [before for _, before, _ in changes]  # in no function so far

    def plain(self, x: object) -> object:
        """What stands for a global name's value."""
        if id(x) not in self._made:
            self._kept.append(x)
            self._made[id(x)] = x  # a function may name itself
            self._made[id(x)] = self._plain(x)
        return self._made[id(x)]

    def _plain(self, x: object) -> object:
        if id(x) in self._substitutes:
            return self._substitutes[id(x)]
        if isinstance(x, core.constexpr):
            return self.plain(x.value)
        if isinstance(x, ConstexprFunction):
            return x.fn
        if getattr(x, "__triton_aggregate__", False):
            return self._record(x)
        if hasattr(x, "fn") and hasattr(x, "arg_names"):  # a function of Triton, or of Gluon
            return self.function(x.fn)
        return x

    def _record(self, cls: type) -> type:
        fields = cls.__annotations__
        if not fields:  # before Triton 3.8 only the class as written has them
            held = [cell.cell_contents for cell in cls.__setattr__.__closure__]
            (fields,) = (x.__annotations__ for x in held if x is not cls)
        methods = {name: self.plain(f) for name, f in vars(cls).items() if hasattr(f, "arg_names")}
        return type(cls.__name__, (Record,), {"fields": [*fields]} | methods)

    def function(self, fn: Callable) -> Callable:
        """A function of a kernel, from its text."""
        lines, first = inspect.getsourcelines(fn)
        text = textwrap.dedent("".join(lines))
        for module, before, after in self._changes:
            if module.__name__ == fn.__module__ and before in inspect.getsource(fn):
                text = textwrap.dedent("".join(lines).replace(before, after))
                self.unplanted = [x for x in self.unplanted if x != before]
        tree = ast.parse(text)
        ast.increment_lineno(tree, first - 1)
        (node,) = tree.body
        node.decorator_list, node.returns = [], None
        for arg in ast.walk(node.args):
            if isinstance(arg, ast.arg):
                arg.annotation = None
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        space = {n: self.plain(x) for n, x in fn.__globals__.items() if n in names}
        space |= {MARKER: True, "range": language.numbers}
        exec(compile(tree, inspect.getsourcefile(fn), "exec"), space)
        return space[fn.__name__]
