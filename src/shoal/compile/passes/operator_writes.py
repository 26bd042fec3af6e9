"""Call custom operators that write to an input on the input itself.

    functional form of op(x) ─► copy_(x, ·)      ──►      op(x)

Functionalisation lets such an operator write to a copy. How often its kernel raises the version of
what it writes to is for nobody to see but the kernel: on the input it is as often as in eager. It
also saves the copies.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from shoal._torch import traces

aten = torch.ops.aten
_FUNCTIONAL_FORM = torch.ops.higher_order.auto_functionalized_v2
VIEWS: dict[Any, tuple[str, str, str]] = {
    aten.slice.Tensor: ("slice_dim", "slice_start", "slice_end"),
    aten.as_strided.default: ("size", "stride", "storage_offset"),
}
"""The views of an input that an operator may be given, and the words for their arguments."""


def write_by_operators(graph: fx.Graph) -> set[int]:
    """Rewrite those calls; the inputs, by place, to which nothing else writes after that."""
    rewritten: set[fx.Node] = set()
    while (found := _last_rewritable(graph)) is not None:
        form, inputs = found
        _rewrite(graph, form, inputs)
        rewritten.update(inputs)
    copied = [node.args[0] for node in _copies(graph)]
    given = enumerate(graph.find_nodes(op="placeholder"))
    return {at for at, node in given if node in rewritten and node not in copied}


def _copies(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=aten.copy_.default))


def _last_rewritable(graph: fx.Graph) -> tuple[fx.Node, list[fx.Node]] | None:
    """The last call whose results are all copied to inputs; with these inputs."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    copies = {
        node.args[1]: node
        for node in _copies(graph)
        if isinstance(node.args[0], fx.Node) and node.args[0].op == "placeholder" and not node.users
    }
    for form in reversed(list(graph.find_nodes(op="call_function", target=_FUNCTIONAL_FORM))):
        bases = list(form.kwargs["_all_bases"])  # type: ignore[arg-type]
        results = _results(form, len(bases))
        written = [copies.get(one) for one in results]
        if all(
            copy is not None and _may_write(form, base, copy, order)
            for base, copy in zip(bases, written, strict=True)
        ):
            return form, [copy.args[0] for copy in written if copy]  # type: ignore[misc]
    return None


def _results(form: fx.Node, num_bases: int) -> list[fx.Node | None]:
    """The nodes of the new values of the tensors that a call writes to."""
    first = _num_returned(form)
    items = {node.args[1]: node for node in form.users if node.target is operator.getitem}
    return [items.get(first + number) for number in range(num_bases)]


def _num_returned(form: fx.Node) -> int:
    return max(1, len(form.args[0]._schema.returns))  # type: ignore[union-attr]


def _may_write(form: fx.Node, base: Any, copy: fx.Node, order: Mapping[fx.Node, int]) -> bool:
    """Whether an input may hold what is copied to it from the call on.

    Nobody may read what it held before, from the call to the copy; nor may the graph return it.
    """
    given, result = copy.args[:2]
    assert isinstance(given, fx.Node)
    assert isinstance(result, fx.Node)
    if base is not given and not _is_result_of_form(base):
        return False
    is_read = any(order[form] < order[one] < order[copy] for one in _readers(given))
    return not is_read and all(one.op != "output" for one in result.users)


def _is_result_of_form(node: Any) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.target is operator.getitem
        and node.args[0].target is _FUNCTIONAL_FORM  # type: ignore[union-attr]
        and len(node.users) == 1
    )


def _readers(given: fx.Node) -> Iterator[fx.Node]:
    """The nodes that read a tensor, by itself or as a view."""
    for one in given.users:
        yield one
        if _is_view(one):
            yield from _readers(one)


def _is_view(node: fx.Node) -> bool:
    """Whether a node may show the memory of what it reads."""
    schema = getattr(node.target, "_schema", None)
    return (schema is None and node.target is not _FUNCTIONAL_FORM) or (
        schema is not None and any(one.alias_info is not None for one in schema.returns)
    )


def _rewrite(graph: fx.Graph, form: fx.Node, inputs: list[fx.Node]) -> None:
    """Call the operator on the inputs; those before it in a chain write there too, then."""
    bases: list[fx.Node] = list(form.kwargs["_all_bases"])  # type: ignore[arg-type]
    for given, result in zip(inputs, _results(form, len(bases)), strict=True):
        assert result is not None
        for copy in [one for one in result.users if one.target is aten.copy_.default]:
            graph.erase_node(copy)
        result.replace_all_uses_with(given)
        graph.erase_node(result)
    with graph.inserting_before(form):
        for given, base in zip(inputs, bases, strict=True):
            if base is not given:  # what wrote to it before
                copy = graph.call_function(aten.copy_.default, (given, base))
                copy.meta = {**base.meta, "val": given.meta.get("val")}
        call = graph.call_function(form.args[0], *_arguments(graph, form, inputs))  # type: ignore[arg-type]
    returned = form.meta.get("val", (None,))[: _num_returned(form)]
    call.meta = {**form.meta, "val": returned[0] if len(returned) == 1 else returned}
    if traces.INPUT_VALUES in form.meta:
        read = fx.map_arg((call.args, call.kwargs), lambda one: one.meta.get("val"))
        call.meta[traces.INPUT_VALUES] = read
    for item in list(form.users):
        if len(returned) == 1:
            item.replace_all_uses_with(call)
            graph.erase_node(item)
        else:
            item.update_arg(0, call)
    graph.erase_node(form)


def _arguments(
    graph: fx.Graph, form: fx.Node, inputs: list[fx.Node]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The operator's own arguments, of those of its functional form."""
    known = dict(form.kwargs)

    def written(name: str) -> fx.Node | None:
        at = known[f"_{name}_base_index"]
        if at is None:
            return None
        base = inputs[at]  # type: ignore[index]
        for op, words in VIEWS.items():
            keys = [f"_{name}_{word}" for word in words]
            if keys[0] in known:
                return _view(graph, op, base, *(known[key] for key in keys))
        return base

    def value(name: str) -> Any:
        if name in known:
            return known[name]
        length: Any = known.get(f"_{name}_length")
        if length is None:
            return written(name)
        return [written(f"{name}_{i}") for i in range(length)]

    schema = form.args[0]._schema  # type: ignore[union-attr]
    listed = tuple(value(one.name) for one in schema.arguments if not one.kwarg_only)
    return listed, {one.name: value(one.name) for one in schema.arguments if one.kwarg_only}


def _view(graph: fx.Graph, op: Any, base: fx.Node, *args: Any) -> fx.Node:
    node = graph.call_function(op, (base, *args))
    value = base.meta.get("val")
    node.meta = {**base.meta, "val": None if value is None else op(value, *args)}
    return node
