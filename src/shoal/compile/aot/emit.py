"""One function around the graphs: what happens to arguments before, and to results after.

Each wrapper writes its lines, in the order of `WRAPPERS`; what runs is one function with all of
them, and none of those that have nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal._torch import traces
from shoal.compile.aot.arrange import Arrangement
from shoal.compile.aot.frame import Frame, mode
from shoal.compile.aot.graph_code import write_run
from shoal.compile.aot.signature import Signature
from shoal.compile.aot.source import Source
from shoal.compile.aot.subclass_code import all_apart, all_names, put_together
from shoal.compile.aot.subclasses import Wrapped, Wrappings
from shoal.compile.aot.wrappers import WRAPPERS


def emit(
    signature: Signature,
    arrangement: Arrangement,
    run: Callable[..., Any],
    *,
    graph: Wrappings | None = None,
    checks: bool = False,
    autocast: bool = False,
) -> Callable[..., Any]:
    """The function to call instead of the one that was captured.

    `run` is an autograd function's, or that of a `graph`, whose inputs come in a list that it
    empties, and which knows nothing of tensors that wrap others. With `checks`, arguments unlike
    those that it was compiled for are refused. With `autocast`, calls come inside of it: what it
    has to cast is cast in the graph already, and the rest is to stay as it is.
    """
    source = Source("call")
    frame = Frame(signature, arrangement, checks)
    arguments = ", ".join(frame.argument(i) for i in range(len(arrangement.places)))
    source.begin(f"def call({arguments}):")
    for wrapper in WRAPPERS:
        wrapper.before(source, frame)
    inputs = [frame.input(at) for at in range(len(signature.inputs))]
    returned = [frame.returned(at) for at in range(signature.num_returned)]
    wrapped: Wrapped = () if graph is None else graph.returned
    # Without anything to differentiate, nothing may be recorded; the graph was traced so.
    records = signature.trains or not any(one.requires_grad for one in signature.inputs)
    if autocast:
        source.begin(f"with {source.name('no_autocast', traces.no_autocast)}():")
    with mode(source, frame, signature.trains or (records and signature.grad_mode)):
        if graph is None:
            results = f"{source.name('run', run)}({', '.join(inputs)})"
        else:
            found = write_run(source, run, all_apart(inputs, graph.inputs))
            results = found.unpacked(0, len(all_names(returned, wrapped)))
        if returned:
            names = "".join(f"{name}, " for name in all_names(returned, wrapped))
            source.line(f"{names}= {results}")
        elif graph is None:
            source.line(results)
    if autocast:
        source.end()
    put_together(source, returned, wrapped)
    if graph is not None:
        for at, k in enumerate(signature.fresh, start=frame.first_fresh):
            out = signature.outputs[k]
            if out.is_view and out.is_base and wrapped[at] is None:
                source.line(f"{returned[at]} = {returned[at]}.detach()")
    for wrapper in WRAPPERS:
        wrapper.after(source, frame)
    source.line("return results")
    source.end()
    return source.compiled("call")
