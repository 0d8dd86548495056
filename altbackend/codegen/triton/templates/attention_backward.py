"""Print the gradients of attention in Triton: of queries by tiles of queries, of keys and values by tiles of keys.

Both compute the weights again from the logsumexp of each row. With `g` the gradient of the result:

    by value    = weights^T @ g
    by final    = weights * (g @ value^T - delta)
    by key      = scale * by_score^T @ query            by query = scale * by_score @ key
"""

from __future__ import annotations

from ....ir import expr as ex
from ....ir.attention import Attention, Backward, Blocks, Gradient
from ....ir.loops import Program, View
from ....schedule.attention import Tiles
from ..expressions import TYPES
from . import attention as text
from .attention import Kernel
from .attention_forward import Printed, finished, place


def by_queries(p: Program, form: Attention, tiles: Tiles, fast: bool, tf32: bool) -> Printed:
    """Return the kernel of the gradients of queries and captured tensors, and the buffers of its parameters."""
    k = text.kernel(p, form, tiles, fast, tf32)
    k.outer.names = frozenset(("b", "h", "q_idx"))
    loops = [line for blocks in form.blocks or (None,) for line in _query_loop(k, blocks)]
    b = _backward(k)
    query, key, value = form.query, form.key, form.value
    lines = [
        *place(k, k.rows, query.sizes[1]),
        *_elements(),
        f"queries = {_matrix(k, query, 'b', 'h', 'q_idx', 'depth')}",
        f"gradients = {_matrix(k, b.gradient, 'b', 'h', 'q_idx', 'width')}",
        *_statistics(k, text.near(k.rows, k), "b", "h"),
        f"keys_of_head = {k.base(key, *k.head_batch(key))}",
        f"values_of_head = {k.base(value, *k.head_batch(value))}",
        *k.outer.lines,
        "sums = tl.zeros([ROWS, DEPTH], tl.float32)",
        *loops,
        *_store(k, 0, "sums", k.rows, ("b", "h"), "depth"),
    ]
    grid = ex.mul(k.rows.blocks, k.rows.tiles, query.sizes[1], query.sizes[0])
    return finished(k, lines, grid, "attention_by_queries")


def by_keys(p: Program, form: Attention, tiles: Tiles, fast: bool, tf32: bool) -> Printed:
    """Return the kernel of the gradients of keys and values, and the buffers of its parameters."""
    k = text.kernel(p, form, tiles, fast, tf32, transposed=True)
    k.outer.names = frozenset(("kv_idx",))
    key, value = form.key, form.value
    pair = k.open_level(("b", "h"))
    loops = [line for blocks in _backward(k).blocks or (None,) for line in _key_loop(k, blocks)]
    k.close_level()
    lines = [
        *place(k, k.columns, key.sizes[1], ("batch_of_keys", "head_of_keys")),
        *_elements(),
        f"keys = {_matrix(k, key, 'batch_of_keys', 'head_of_keys', 'kv_idx', 'depth')}",
        f"values = {_matrix(k, value, 'batch_of_keys', 'head_of_keys', 'kv_idx', 'width')}",
        *k.outer.lines,
        "key_sums = tl.zeros([COLUMNS, DEPTH], tl.float32)",
        "value_sums = tl.zeros([COLUMNS, WIDTH], tl.float32)",
        *_pairs(k, [*_bases(k), *pair.lines, *loops]),
        *_store(k, 1, "key_sums", k.columns, ("batch_of_keys", "head_of_keys"), "depth"),
        *_store(k, 2, "value_sums", k.columns, ("batch_of_keys", "head_of_keys"), "width"),
    ]
    grid = ex.mul(k.columns.blocks, k.columns.tiles, key.sizes[1], key.sizes[0])
    return finished(k, lines, grid, "attention_by_keys")


def _backward(k: Kernel) -> Backward:
    assert k.form.backward is not None
    return k.form.backward


def _elements() -> list[str]:
    return ["depth = tl.arange(0, DEPTH)", "width = tl.arange(0, WIDTH)"]


def _matrix(k: Kernel, v: View, batch: str, head: str, position: str, elements: str, base: str = "") -> str:
    """Return the load of a tile of whole heads: positions along its first axis, elements along its second."""
    padded = k.tiles.depth if elements == "depth" else k.tiles.width
    mask = text.joined("", text.depth_mask(v, padded, elements))
    return k.matrix(base or k.base(v, batch, head), v, position, f"{elements}[None, :]", mask)


def _statistics(k: Kernel, rows: str, *at: str) -> list[str]:
    """Return loads of the logsumexp and of what the softmax subtracts; in a row without scores all weights are 0."""
    b = _backward(k)
    bases = ("logsumexp_of_head", "delta_of_head") if not at else (k.base(b.logsumexp, *at), k.base(b.delta, *at))
    return [
        f"base = tl.load({bases[0]} + {k.step(b.logsumexp, 2, rows)})",
        'base = tl.where(base == float("-inf"), 0.0, base)',
        f"delta = tl.load({bases[1]} + {k.step(b.delta, 2, rows)})",
    ]


def _query_loop(k: Kernel, blocks: Blocks | None) -> list[str]:
    level = k.open_level(("kv_idx", "score", "grad"))
    near = f"{text.near(k.columns, k)}[:, None]"
    level.lines += [
        f"keys = {_matrix(k, k.form.key, '', '', near, 'depth', 'keys_of_head')}",
        f"values = {_matrix(k, k.form.value, '', '', near, 'width', 'values_of_head')}",
    ]
    keeps = text.scores(k, k.dot("queries", "tl.trans(keys)"), blocks is None or blocks.masked, k.columns)
    level.lines += [
        "weights = tl.exp2(final - base[:, None])",
        f"grad = weights * ({k.dot('gradients', 'tl.trans(values)')} - delta[:, None])",
    ]
    _by_score(k, keeps)
    level.lines.append(f"sums = {k.dot(k.rounded('by_score'), 'keys', 'sums')}")
    for g in _backward(k).captured:
        _add_captured(k, g, keeps)
    return text.visit(k, blocks, "block", k.columns, k.close_level())


def _key_loop(k: Kernel, blocks: Blocks | None) -> list[str]:
    level = k.open_level(("q_idx", "score", "grad"))
    near = text.near(k.rows, k)
    level.lines += [
        f"queries = {_matrix(k, k.form.query, '', '', near + '[:, None]', 'depth', 'queries_of_head')}",
        f"gradients = {_matrix(k, _backward(k).gradient, '', '', near + '[:, None]', 'width', 'gradients_of_head')}",
        *_statistics(k, near),
    ]
    keeps = text.scores(k, k.dot("keys", "tl.trans(queries)"), blocks is None or blocks.masked, k.rows)
    level.lines += [
        "weights = tl.exp2(final - base[None, :])",
        f"value_sums = {k.dot(k.rounded('weights'), 'gradients', 'value_sums')}",
        f"grad = weights * ({k.dot('values', 'tl.trans(gradients)')} - delta[None, :])",
    ]
    _by_score(k, keeps)
    level.lines.append(f"key_sums = {k.dot(k.rounded('by_score'), 'queries', 'key_sums')}")
    return text.visit(k, blocks, "block", k.rows, k.close_level())


def _by_score(k: Kernel, keeps: bool) -> None:
    """Add the lines of the gradient by the product of queries and keys, which is 0 where the score is left out."""
    scaled = f"{k.scalars.full(_backward(k).score)} * {k.form.scale!r}"
    text_of = f"tl.where(keeps, {scaled}, 0.0)" if keeps else scaled
    k.scalars.levels[-1].lines.append(f"by_score = {text_of}")


def _add_captured(k: Kernel, g: Gradient, keeps: bool) -> None:
    """Add the lines that add a captured tensor's gradient, summed along the axes in which its position is constant."""
    scalars, level = k.scalars, k.scalars.levels[-1]
    place_text, guards, axes = scalars.position(g.index, small=False)
    value = scalars.full(g.value)
    rows = text.is_inside(k, k.rows, "block")
    conditions = [*(["keeps"] if keeps else []), *([f"({rows})[:, None]"] if rows else [])]
    level.lines.append(
        f"added = tl.where({' & '.join(conditions)}, {value}, 0.0)" if conditions else f"added = {value}"
    )
    for axis, label in enumerate(scalars.shape):
        if label not in axes:
            level.lines.append(f"added = tl.sum(added, {axis}, keep_dims=True)")
    masks = [guard.attr for guard in guards]
    if "m" in axes and rows:
        masks.append(f"({rows})[:, None]")
    inside = text.is_inside(k, k.columns, "visited")
    if "n" in axes and inside:
        masks.append(f"({inside})[None, :]")
    where = f"{k.parameters.of(g.out.buffer)} + tl.broadcast_to({place_text}, {scalars.shape_text(axes)})"
    mask = f", mask={' & '.join(masks)}" if masks else ""
    level.lines.append(f'tl.atomic_add({where}, added{mask}, sem="relaxed")')


def _bases(k: Kernel) -> list[str]:
    """Return lines that find the rows of one batch and head."""
    b = _backward(k)
    parts = (("queries", k.form.query), ("gradients", b.gradient), ("logsumexp", b.logsumexp), ("delta", b.delta))
    return [f"{name}_of_head = {k.base(v, 'b', 'h')}" for name, v in parts]


def _pairs(k: Kernel, lines: list[str]) -> list[str]:
    """Return a loop over the batches and heads that share the tile's keys."""
    query, key = k.form.query, k.form.key
    heads, key_heads = query.sizes[1], key.sizes[1]
    assert isinstance(heads, int)
    assert isinstance(key_heads, int)
    group = heads // key_heads
    batches = query.sizes[0] if key.sizes[0] != query.sizes[0] else 1
    if group == 1 and batches == 1:
        return ["b = batch_of_keys", "h = head_of_keys", *lines]
    own = [
        "b = batch_of_keys" if batches == 1 else f"b = tl.cast(pair // {group}, tl.int32)",
        f"h = head_of_keys * {group} + tl.cast(pair % {group}, tl.int32)",
    ]
    count = k.parameters.text(ex.mul(batches, group))
    return [f"for pair in range(0, {count}):", *(f"    {x}" for x in (*own, *lines))]


def _store(k: Kernel, result: int, sums: str, side: text.Side, at: tuple[str, str], elements: str) -> list[str]:
    """Return the line that stores a gradient, if something reads it."""
    name = k.form.out[result]
    if name is None:
        return []
    b = k.program.buffers[name]
    v = View(name, b.sizes, b.strides)
    padded = k.tiles.depth if elements == "depth" else k.tiles.width
    mask = text.joined(text.is_inside(k, side, "block"), text.depth_mask(v, padded, elements))
    place_text = f"{k.base(v, *at)} + {k.step(v, 2, side.positions + '[:, None]')}"
    place_text += f" + {k.step(v, 3, elements + '[None, :]')}"
    masked = f", mask={mask}" if mask else ""
    return [f"tl.store({place_text}, tl.cast({sums}, {TYPES[b.dtype]}){masked})"]
