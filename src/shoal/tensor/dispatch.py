"""Which handler an operation gets: one by name, or one by rule, or a refusal."""

from __future__ import annotations

from shoal.tensor import copies, draws, elementwise, lists, norms, paired, reductions
from shoal.tensor.refusal import refuse
from shoal.tensor.sharded import Handler, Op

_NAMED: dict[str, Handler] = {
    **copies.HANDLERS,
    **draws.HANDLERS,
    **lists.HANDLERS,
    **norms.HANDLERS,
    **paired.HANDLERS,
    **reductions.HANDLERS,
}
"""By operation and overload; a name alone means all overloads of it."""


def handler_of(op: Op) -> Handler:
    """Find the handler of an operation, which then serves all its calls."""
    if op.namespace != "aten":
        return refuse
    packet = op.__name__.partition(".")[0]
    named = _NAMED.get(op.__name__) or _NAMED.get(packet)
    if named is not None:
        return named
    if lists.is_elementwise(op):
        return lists.foreach
    if elementwise.is_elementwise(op):
        return elementwise.handler(op)
    return refuse
