"""One declaration an operator; the forms in which PyTorch meets it follow from it.

An operator is declared by the axes of its tensors, and completed by its composition of stages:

    twice = Operator("twice", {"x": "B T D"}, {"y": like("B T D", "x")}, stages=stages)

    @twice.forward
    def forward(stages, x): ...

    @twice.backward
    def backward(stages, dy): ...

What a function takes is told by the names of its arguments. Files, by time: `declaration`, what is
said at import, and the shapes that follow from it; `composing`, how the composition is run;
`forms`, in which of its forms a call meets PyTorch, whole or in `pieces`.
"""

from linattn_edu.ops.operator.declaration import counted, like, widened
from linattn_edu.ops.operator.forms import Operator

__all__ = ["Operator", "counted", "like", "widened"]
