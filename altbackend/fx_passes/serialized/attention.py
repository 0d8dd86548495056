"""Patterns of `fx_passes/traced/attention.py`. `python -m altbackend patterns --write` writes this file."""

# fmt: off
from __future__ import annotations

from collections.abc import Callable

import torch

from ..pattern.terms import Arg, Like, call
from ..pattern.trace import Traced

aten = torch.ops.aten


def plain() -> Traced:
    """Return the pattern plain."""
    n0 = call(aten.view.default, Arg('query'), Like('sizes'))
    n1 = call(aten.transpose.int, Arg('key'), Like('int'), Like('int'))
    n2 = call(aten.view.default, n1, Like('sizes'))
    n3 = call(aten.bmm.default, n0, n2)
    n4 = call(aten.view.default, n3, Like('sizes'))
    n5 = call(aten._softmax.default, n4, Like('int'), False)
    n6 = call(aten.view.default, n5, Like('sizes'))
    n7 = call(aten.view.default, Arg('value'), Like('sizes'))
    n8 = call(aten.bmm.default, n6, n7)
    n9 = call(aten.view.default, n8, Like('sizes'))
    names = ('query', 'key', 'value')
    outputs = (n9,)
    return Traced(names, outputs, (0,), ())


def scaled() -> Traced:
    """Return the pattern scaled."""
    n0 = call(aten.view.default, Arg('query'), Like('sizes'))
    n1 = call(aten.transpose.int, Arg('key'), Like('int'), Like('int'))
    n2 = call(aten.view.default, n1, Like('sizes'))
    n3 = call(aten.bmm.default, n0, n2)
    n4 = call(aten.view.default, n3, Like('sizes'))
    n5 = call(aten.mul.Tensor, n4, Arg('scale'))
    n6 = call(aten._softmax.default, n5, Like('int'), False)
    n7 = call(aten.view.default, n6, Like('sizes'))
    n8 = call(aten.view.default, Arg('value'), Like('sizes'))
    n9 = call(aten.bmm.default, n7, n8)
    n10 = call(aten.view.default, n9, Like('sizes'))
    names = ('query', 'key', 'value', 'scale')
    outputs = (n10,)
    return Traced(names, outputs, (0,), ())


def divided() -> Traced:
    """Return the pattern divided."""
    n0 = call(aten.view.default, Arg('query'), Like('sizes'))
    n1 = call(aten.transpose.int, Arg('key'), Like('int'), Like('int'))
    n2 = call(aten.view.default, n1, Like('sizes'))
    n3 = call(aten.bmm.default, n0, n2)
    n4 = call(aten.view.default, n3, Like('sizes'))
    n5 = call(aten.div.Tensor, n4, Arg('scale'))
    n6 = call(aten._softmax.default, n5, Like('int'), False)
    n7 = call(aten.view.default, n6, Like('sizes'))
    n8 = call(aten.view.default, Arg('value'), Like('sizes'))
    n9 = call(aten.bmm.default, n7, n8)
    n10 = call(aten.view.default, n9, Like('sizes'))
    names = ('query', 'key', 'value', 'scale')
    outputs = (n10,)
    return Traced(names, outputs, (0,), ())


def masked() -> Traced:
    """Return the pattern masked."""
    n0 = call(aten.view.default, Arg('query'), Like('sizes'))
    n1 = call(aten.transpose.int, Arg('key'), Like('int'), Like('int'))
    n2 = call(aten.view.default, n1, Like('sizes'))
    n3 = call(aten.bmm.default, n0, n2)
    n4 = call(aten.view.default, n3, Like('sizes'))
    n5 = call(aten.mul.Tensor, n4, Arg('scale'))
    n6 = call(aten.add.Tensor, n5, Arg('mask'), Like('int'))
    n7 = call(aten._softmax.default, n6, Like('int'), False)
    n8 = call(aten.view.default, n7, Like('sizes'))
    n9 = call(aten.view.default, Arg('value'), Like('sizes'))
    n10 = call(aten.bmm.default, n8, n9)
    n11 = call(aten.view.default, n10, Like('sizes'))
    names = ('query', 'key', 'value', 'mask', 'scale')
    outputs = (n11,)
    return Traced(names, outputs, (0,), ())


def plain_of_views() -> Traced:
    """Return the pattern plain_of_views."""
    n0 = call(aten.clone.default, Arg('query'), Like('format'))
    n1 = call(aten.view.default, n0, Like('sizes'))
    n2 = call(aten.transpose.int, Arg('key'), Like('int'), Like('int'))
    n3 = call(aten.clone.default, n2, Like('format'))
    n4 = call(aten.view.default, n3, Like('sizes'))
    n5 = call(aten.bmm.default, n1, n4)
    n6 = call(aten.view.default, n5, Like('sizes'))
    n7 = call(aten._softmax.default, n6, Like('int'), False)
    n8 = call(aten.view.default, n7, Like('sizes'))
    n9 = call(aten.clone.default, Arg('value'), Like('format'))
    n10 = call(aten.view.default, n9, Like('sizes'))
    n11 = call(aten.bmm.default, n8, n10)
    n12 = call(aten.view.default, n11, Like('sizes'))
    names = ('query', 'key', 'value')
    outputs = (n12,)
    return Traced(names, outputs, (0,), ())


def scaled_of_views() -> Traced:
    """Return the pattern scaled_of_views."""
    n0 = call(aten.clone.default, Arg('query'), Like('format'))
    n1 = call(aten.view.default, n0, Like('sizes'))
    n2 = call(aten.transpose.int, Arg('key'), Like('int'), Like('int'))
    n3 = call(aten.clone.default, n2, Like('format'))
    n4 = call(aten.view.default, n3, Like('sizes'))
    n5 = call(aten.bmm.default, n1, n4)
    n6 = call(aten.view.default, n5, Like('sizes'))
    n7 = call(aten.mul.Tensor, n6, Arg('scale'))
    n8 = call(aten._softmax.default, n7, Like('int'), False)
    n9 = call(aten.view.default, n8, Like('sizes'))
    n10 = call(aten.clone.default, Arg('value'), Like('format'))
    n11 = call(aten.view.default, n10, Like('sizes'))
    n12 = call(aten.bmm.default, n9, n11)
    n13 = call(aten.view.default, n12, Like('sizes'))
    names = ('query', 'key', 'value', 'scale')
    outputs = (n13,)
    return Traced(names, outputs, (0,), ())


def divided_of_views() -> Traced:
    """Return the pattern divided_of_views."""
    n0 = call(aten.clone.default, Arg('query'), Like('format'))
    n1 = call(aten.view.default, n0, Like('sizes'))
    n2 = call(aten.transpose.int, Arg('key'), Like('int'), Like('int'))
    n3 = call(aten.clone.default, n2, Like('format'))
    n4 = call(aten.view.default, n3, Like('sizes'))
    n5 = call(aten.bmm.default, n1, n4)
    n6 = call(aten.view.default, n5, Like('sizes'))
    n7 = call(aten.div.Tensor, n6, Arg('scale'))
    n8 = call(aten._softmax.default, n7, Like('int'), False)
    n9 = call(aten.view.default, n8, Like('sizes'))
    n10 = call(aten.clone.default, Arg('value'), Like('format'))
    n11 = call(aten.view.default, n10, Like('sizes'))
    n12 = call(aten.bmm.default, n9, n11)
    n13 = call(aten.view.default, n12, Like('sizes'))
    names = ('query', 'key', 'value', 'scale')
    outputs = (n13,)
    return Traced(names, outputs, (0,), ())


def masked_of_views() -> Traced:
    """Return the pattern masked_of_views."""
    n0 = call(aten.clone.default, Arg('query'), Like('format'))
    n1 = call(aten.view.default, n0, Like('sizes'))
    n2 = call(aten.transpose.int, Arg('key'), Like('int'), Like('int'))
    n3 = call(aten.clone.default, n2, Like('format'))
    n4 = call(aten.view.default, n3, Like('sizes'))
    n5 = call(aten.bmm.default, n1, n4)
    n6 = call(aten.view.default, n5, Like('sizes'))
    n7 = call(aten.mul.Tensor, n6, Arg('scale'))
    n8 = call(aten.add.Tensor, n7, Arg('mask'), Like('int'))
    n9 = call(aten._softmax.default, n8, Like('int'), False)
    n10 = call(aten.view.default, n9, Like('sizes'))
    n11 = call(aten.clone.default, Arg('value'), Like('format'))
    n12 = call(aten.view.default, n11, Like('sizes'))
    n13 = call(aten.bmm.default, n10, n12)
    n14 = call(aten.view.default, n13, Like('sizes'))
    names = ('query', 'key', 'value', 'mask', 'scale')
    outputs = (n14,)
    return Traced(names, outputs, (0,), ())


def plain_joint() -> Traced:
    """Return the pattern plain_joint."""
    n0 = call(aten.view.default, Arg('query'), Like('sizes'))
    n1 = call(aten.transpose.int, Arg('key'), Like('int'), Like('int'))
    n2 = call(aten.view.default, n1, Like('sizes'))
    n3 = call(aten.bmm.default, n0, n2)
    n4 = call(aten.view.default, n3, Like('sizes'))
    n5 = call(aten._softmax.default, n4, Like('int'), False)
    n6 = call(aten.view.default, n5, Like('sizes'))
    n7 = call(aten.view.default, Arg('value'), Like('sizes'))
    n8 = call(aten.bmm.default, n6, n7)
    n9 = call(aten.view.default, n8, Like('sizes'))
    n10 = call(aten.view.default, Arg('tangent_0'), Like('sizes'))
    n11 = call(aten.transpose.int, n7, Like('int'), Like('int'))
    n12 = call(aten.bmm.default, n10, n11)
    n13 = call(aten.view.default, n12, Like('sizes'))
    n14 = call(aten.mul.Tensor, n13, n5)
    n15 = call(aten.sum.dim_IntList, n14, Like('sizes'), True, None)
    n16 = call(aten.mul.Tensor, n5, n15)
    n17 = call(aten.sub.Tensor, n14, n16, Like('int'))
    n18 = call(aten.view.default, n17, Like('sizes'))
    n19 = call(aten.transpose.int, n2, Like('int'), Like('int'))
    n20 = call(aten.bmm.default, n18, n19)
    n21 = call(aten.view.default, n20, Like('sizes'))
    n22 = call(aten.transpose.int, n0, Like('int'), Like('int'))
    n23 = call(aten.bmm.default, n22, n18)
    n24 = call(aten.view.default, n23, Like('sizes'))
    n25 = call(aten.transpose.int, n24, Like('int'), Like('int'))
    n26 = call(aten.transpose.int, n6, Like('int'), Like('int'))
    n27 = call(aten.bmm.default, n26, n10)
    n28 = call(aten.view.default, n27, Like('sizes'))
    names = ('query', 'key', 'value', 'tangent_0')
    outputs = (n9, n21, n25, n28,)
    return Traced(names, outputs, (0, 1, 2, 3), ('query', 'key', 'value'))


def scaled_joint() -> Traced:
    """Return the pattern scaled_joint."""
    n0 = call(aten.view.default, Arg('query'), Like('sizes'))
    n1 = call(aten.transpose.int, Arg('key'), Like('int'), Like('int'))
    n2 = call(aten.view.default, n1, Like('sizes'))
    n3 = call(aten.bmm.default, n0, n2)
    n4 = call(aten.view.default, n3, Like('sizes'))
    n5 = call(aten.mul.Tensor, n4, Arg('scale'))
    n6 = call(aten._softmax.default, n5, Like('int'), False)
    n7 = call(aten.view.default, n6, Like('sizes'))
    n8 = call(aten.view.default, Arg('value'), Like('sizes'))
    n9 = call(aten.bmm.default, n7, n8)
    n10 = call(aten.view.default, n9, Like('sizes'))
    n11 = call(aten.view.default, Arg('tangent_0'), Like('sizes'))
    n12 = call(aten.transpose.int, n8, Like('int'), Like('int'))
    n13 = call(aten.bmm.default, n11, n12)
    n14 = call(aten.view.default, n13, Like('sizes'))
    n15 = call(aten.mul.Tensor, n14, n6)
    n16 = call(aten.sum.dim_IntList, n15, Like('sizes'), True, None)
    n17 = call(aten.mul.Tensor, n6, n16)
    n18 = call(aten.sub.Tensor, n15, n17, Like('int'))
    n19 = call(aten.mul.Tensor, n18, Arg('scale'))
    n20 = call(aten.view.default, n19, Like('sizes'))
    n21 = call(aten.transpose.int, n2, Like('int'), Like('int'))
    n22 = call(aten.bmm.default, n20, n21)
    n23 = call(aten.view.default, n22, Like('sizes'))
    n24 = call(aten.transpose.int, n0, Like('int'), Like('int'))
    n25 = call(aten.bmm.default, n24, n20)
    n26 = call(aten.view.default, n25, Like('sizes'))
    n27 = call(aten.transpose.int, n26, Like('int'), Like('int'))
    n28 = call(aten.transpose.int, n7, Like('int'), Like('int'))
    n29 = call(aten.bmm.default, n28, n11)
    n30 = call(aten.view.default, n29, Like('sizes'))
    names = ('query', 'key', 'value', 'scale', 'tangent_0')
    outputs = (n10, n23, n27, n30,)
    return Traced(names, outputs, (0, 1, 2, 3), ('query', 'key', 'value'))


def divided_joint() -> Traced:
    """Return the pattern divided_joint."""
    n0 = call(aten.view.default, Arg('query'), Like('sizes'))
    n1 = call(aten.transpose.int, Arg('key'), Like('int'), Like('int'))
    n2 = call(aten.view.default, n1, Like('sizes'))
    n3 = call(aten.bmm.default, n0, n2)
    n4 = call(aten.view.default, n3, Like('sizes'))
    n5 = call(aten.div.Tensor, n4, Arg('scale'))
    n6 = call(aten._softmax.default, n5, Like('int'), False)
    n7 = call(aten.view.default, n6, Like('sizes'))
    n8 = call(aten.view.default, Arg('value'), Like('sizes'))
    n9 = call(aten.bmm.default, n7, n8)
    n10 = call(aten.view.default, n9, Like('sizes'))
    n11 = call(aten.view.default, Arg('tangent_0'), Like('sizes'))
    n12 = call(aten.transpose.int, n8, Like('int'), Like('int'))
    n13 = call(aten.bmm.default, n11, n12)
    n14 = call(aten.view.default, n13, Like('sizes'))
    n15 = call(aten.mul.Tensor, n14, n6)
    n16 = call(aten.sum.dim_IntList, n15, Like('sizes'), True, None)
    n17 = call(aten.mul.Tensor, n6, n16)
    n18 = call(aten.sub.Tensor, n15, n17, Like('int'))
    n19 = call(aten.div.Tensor, n18, Arg('scale'))
    n20 = call(aten.view.default, n19, Like('sizes'))
    n21 = call(aten.transpose.int, n2, Like('int'), Like('int'))
    n22 = call(aten.bmm.default, n20, n21)
    n23 = call(aten.view.default, n22, Like('sizes'))
    n24 = call(aten.transpose.int, n0, Like('int'), Like('int'))
    n25 = call(aten.bmm.default, n24, n20)
    n26 = call(aten.view.default, n25, Like('sizes'))
    n27 = call(aten.transpose.int, n26, Like('int'), Like('int'))
    n28 = call(aten.transpose.int, n7, Like('int'), Like('int'))
    n29 = call(aten.bmm.default, n28, n11)
    n30 = call(aten.view.default, n29, Like('sizes'))
    names = ('query', 'key', 'value', 'scale', 'tangent_0')
    outputs = (n10, n23, n27, n30,)
    return Traced(names, outputs, (0, 1, 2, 3), ('query', 'key', 'value'))


def plain_of_views_joint() -> Traced:
    """Return the pattern plain_of_views_joint."""
    n0 = call(aten.clone.default, Arg('query'), Like('format'))
    n1 = call(aten.view.default, n0, Like('sizes'))
    n2 = call(aten.transpose.int, Arg('key'), Like('int'), Like('int'))
    n3 = call(aten.clone.default, n2, Like('format'))
    n4 = call(aten.view.default, n3, Like('sizes'))
    n5 = call(aten.bmm.default, n1, n4)
    n6 = call(aten.view.default, n5, Like('sizes'))
    n7 = call(aten._softmax.default, n6, Like('int'), False)
    n8 = call(aten.view.default, n7, Like('sizes'))
    n9 = call(aten.clone.default, Arg('value'), Like('format'))
    n10 = call(aten.view.default, n9, Like('sizes'))
    n11 = call(aten.bmm.default, n8, n10)
    n12 = call(aten.view.default, n11, Like('sizes'))
    n13 = call(aten.view.default, Arg('tangent_0'), Like('sizes'))
    n14 = call(aten.transpose.int, n10, Like('int'), Like('int'))
    n15 = call(aten.bmm.default, n13, n14)
    n16 = call(aten.view.default, n15, Like('sizes'))
    n17 = call(aten.mul.Tensor, n16, n7)
    n18 = call(aten.sum.dim_IntList, n17, Like('sizes'), True, None)
    n19 = call(aten.mul.Tensor, n7, n18)
    n20 = call(aten.sub.Tensor, n17, n19, Like('int'))
    n21 = call(aten.view.default, n20, Like('sizes'))
    n22 = call(aten.transpose.int, n4, Like('int'), Like('int'))
    n23 = call(aten.bmm.default, n21, n22)
    n24 = call(aten.view.default, n23, Like('sizes'))
    n25 = call(aten.transpose.int, n1, Like('int'), Like('int'))
    n26 = call(aten.bmm.default, n25, n21)
    n27 = call(aten.view.default, n26, Like('sizes'))
    n28 = call(aten.transpose.int, n27, Like('int'), Like('int'))
    n29 = call(aten.transpose.int, n8, Like('int'), Like('int'))
    n30 = call(aten.bmm.default, n29, n13)
    n31 = call(aten.view.default, n30, Like('sizes'))
    names = ('query', 'key', 'value', 'tangent_0')
    outputs = (n12, n24, n28, n31,)
    return Traced(names, outputs, (0, 1, 2, 3), ('query', 'key', 'value'))


def scaled_of_views_joint() -> Traced:
    """Return the pattern scaled_of_views_joint."""
    n0 = call(aten.clone.default, Arg('query'), Like('format'))
    n1 = call(aten.view.default, n0, Like('sizes'))
    n2 = call(aten.transpose.int, Arg('key'), Like('int'), Like('int'))
    n3 = call(aten.clone.default, n2, Like('format'))
    n4 = call(aten.view.default, n3, Like('sizes'))
    n5 = call(aten.bmm.default, n1, n4)
    n6 = call(aten.view.default, n5, Like('sizes'))
    n7 = call(aten.mul.Tensor, n6, Arg('scale'))
    n8 = call(aten._softmax.default, n7, Like('int'), False)
    n9 = call(aten.view.default, n8, Like('sizes'))
    n10 = call(aten.clone.default, Arg('value'), Like('format'))
    n11 = call(aten.view.default, n10, Like('sizes'))
    n12 = call(aten.bmm.default, n9, n11)
    n13 = call(aten.view.default, n12, Like('sizes'))
    n14 = call(aten.view.default, Arg('tangent_0'), Like('sizes'))
    n15 = call(aten.transpose.int, n11, Like('int'), Like('int'))
    n16 = call(aten.bmm.default, n14, n15)
    n17 = call(aten.view.default, n16, Like('sizes'))
    n18 = call(aten.mul.Tensor, n17, n8)
    n19 = call(aten.sum.dim_IntList, n18, Like('sizes'), True, None)
    n20 = call(aten.mul.Tensor, n8, n19)
    n21 = call(aten.sub.Tensor, n18, n20, Like('int'))
    n22 = call(aten.mul.Tensor, n21, Arg('scale'))
    n23 = call(aten.view.default, n22, Like('sizes'))
    n24 = call(aten.transpose.int, n4, Like('int'), Like('int'))
    n25 = call(aten.bmm.default, n23, n24)
    n26 = call(aten.view.default, n25, Like('sizes'))
    n27 = call(aten.transpose.int, n1, Like('int'), Like('int'))
    n28 = call(aten.bmm.default, n27, n23)
    n29 = call(aten.view.default, n28, Like('sizes'))
    n30 = call(aten.transpose.int, n29, Like('int'), Like('int'))
    n31 = call(aten.transpose.int, n9, Like('int'), Like('int'))
    n32 = call(aten.bmm.default, n31, n14)
    n33 = call(aten.view.default, n32, Like('sizes'))
    names = ('query', 'key', 'value', 'scale', 'tangent_0')
    outputs = (n13, n26, n30, n33,)
    return Traced(names, outputs, (0, 1, 2, 3), ('query', 'key', 'value'))


def divided_of_views_joint() -> Traced:
    """Return the pattern divided_of_views_joint."""
    n0 = call(aten.clone.default, Arg('query'), Like('format'))
    n1 = call(aten.view.default, n0, Like('sizes'))
    n2 = call(aten.transpose.int, Arg('key'), Like('int'), Like('int'))
    n3 = call(aten.clone.default, n2, Like('format'))
    n4 = call(aten.view.default, n3, Like('sizes'))
    n5 = call(aten.bmm.default, n1, n4)
    n6 = call(aten.view.default, n5, Like('sizes'))
    n7 = call(aten.div.Tensor, n6, Arg('scale'))
    n8 = call(aten._softmax.default, n7, Like('int'), False)
    n9 = call(aten.view.default, n8, Like('sizes'))
    n10 = call(aten.clone.default, Arg('value'), Like('format'))
    n11 = call(aten.view.default, n10, Like('sizes'))
    n12 = call(aten.bmm.default, n9, n11)
    n13 = call(aten.view.default, n12, Like('sizes'))
    n14 = call(aten.view.default, Arg('tangent_0'), Like('sizes'))
    n15 = call(aten.transpose.int, n11, Like('int'), Like('int'))
    n16 = call(aten.bmm.default, n14, n15)
    n17 = call(aten.view.default, n16, Like('sizes'))
    n18 = call(aten.mul.Tensor, n17, n8)
    n19 = call(aten.sum.dim_IntList, n18, Like('sizes'), True, None)
    n20 = call(aten.mul.Tensor, n8, n19)
    n21 = call(aten.sub.Tensor, n18, n20, Like('int'))
    n22 = call(aten.div.Tensor, n21, Arg('scale'))
    n23 = call(aten.view.default, n22, Like('sizes'))
    n24 = call(aten.transpose.int, n4, Like('int'), Like('int'))
    n25 = call(aten.bmm.default, n23, n24)
    n26 = call(aten.view.default, n25, Like('sizes'))
    n27 = call(aten.transpose.int, n1, Like('int'), Like('int'))
    n28 = call(aten.bmm.default, n27, n23)
    n29 = call(aten.view.default, n28, Like('sizes'))
    n30 = call(aten.transpose.int, n29, Like('int'), Like('int'))
    n31 = call(aten.transpose.int, n9, Like('int'), Like('int'))
    n32 = call(aten.bmm.default, n31, n14)
    n33 = call(aten.view.default, n32, Like('sizes'))
    names = ('query', 'key', 'value', 'scale', 'tangent_0')
    outputs = (n13, n26, n30, n33,)
    return Traced(names, outputs, (0, 1, 2, 3), ('query', 'key', 'value'))


PATTERNS: dict[str, Callable[[], Traced]] = {
    "plain": plain,
    "scaled": scaled,
    "divided": divided,
    "masked": masked,
    "plain_of_views": plain_of_views,
    "scaled_of_views": scaled_of_views,
    "divided_of_views": divided_of_views,
    "masked_of_views": masked_of_views,
    "plain_joint": plain_joint,
    "scaled_joint": scaled_joint,
    "divided_joint": divided_joint,
    "plain_of_views_joint": plain_of_views_joint,
    "scaled_of_views_joint": scaled_of_views_joint,
    "divided_of_views_joint": divided_of_views_joint,
}
