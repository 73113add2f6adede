"""Measured choices of the library's algorithms, one entry per product: {(N, K): {rows: the fields of `Algorithm`}}.

`None` is the library's own choice: as fast, within 1.5%, or not compared. An entry for `rows` serves every number of
rows up to it that has no smaller entry; more rows than the last, and sizes that are not here, go to the library. Steps
are padded to the sizes of `buckets.py`, which is why there are so few numbers of rows; those measured at 8,192 also
serve steps in which some rows decode beside as many tokens of prompts. Products of 8,192 rows that add to what is there
take as long as those that do not, with the same algorithms as the fastest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.ops.linear.cublaslt import ChoicesByRows, ChosenProduct

Table = dict[tuple[int, int], ChoicesByRows]

MEASURED_ON = (9, 0)
"""The compute capability that the times were taken on; the kernels exist for no other."""

BF16: Table = {
    (1024, 2048): {
        128: None,
        192: (32, 64, 1, 1, 0),
        224: (64, 32, 1, 1, 1),
        256: (32, 64, 1, 1, 0),
        896: None,
        1024: (64, 128, 2, 1, 1),
    },
    (1024, 3072): {
        128: None,
        160: (32, 64, 4, 1, 0),
        192: (32, 64, 1, 1, 0),
        224: (64, 32, 1, 1, 1),
        256: (32, 64, 1, 2, 0),
        896: None,
        1024: (64, 128, 2, 1, 1),
    },
    (2048, 4096): {
        480: None,
        512: (64, 128, 1, 1, 0),
        6144: None,
        8704: (128, 144, 2, 1, 1),
    },
    (4096, 1024): {
        128: None,
        160: (64, 80, 1, 1, 1),
        192: (96, 64, 1, 1, 0),
        224: (64, 112, 1, 1, 1),
        256: (128, 64, 1, 1, 0),
        480: None,
        512: (256, 64, 1, 2, 6),
        896: None,
        1024: (128, 128, 1, 2, 3),
        6144: None,
        8704: (128, 160, 2, 1, 1),
    },
    (4096, 4096): {
        112: None,
        128: (64, 64, 1, 2, 0),
        160: (64, 80, 1, 1, 1),
        192: (64, 96, 1, 1, 1),
        224: (64, 112, 1, 1, 1),
        256: None,
        288: (128, 72, 1, 1, 1),
        320: None,
        352: (128, 88, 1, 1, 1),
        384: None,
        416: (128, 104, 2, 1, 5),
        448: (128, 112, 1, 2, 7),
        768: None,
        896: (128, 224, 2, 1, 5),
        1024: None,
        1280: (160, 128, 1, 2, 2),
        1408: None,
        1664: (128, 208, 2, 1, 7),
        1792: (128, 224, 2, 1, 5),
        3072: None,
        4096: (112, 128, 1, 2, 2),
        6144: None,
        8704: (128, 168, 2, 1, 3),
    },
    (4096, 14336): {
        112: None,
        128: (64, 64, 1, 2, 2),
        160: None,
        192: (128, 48, 1, 1, 1),
        224: (128, 56, 1, 1, 1),
        256: (128, 64, 1, 1, 0),
        288: (128, 72, 1, 1, 5),
        320: None,
        352: (128, 88, 1, 2, 7),
        384: None,
        416: (128, 104, 1, 2, 7),
        448: (128, 112, 1, 2, 1),
        640: None,
        768: (128, 192, 2, 1, 5),
        896: (112, 128, 1, 1, 2),
        1024: None,
        1280: (128, 320, 1, 2, 5),
        1408: None,
        1664: (128, 208, 1, 2, 7),
        1792: (128, 224, 2, 1, 5),
        3072: None,
        4096: (256, 128, 1, 2, 7),
        6144: None,
        8704: (128, 168, 2, 1, 3),
    },
    (5120, 2048): {
        480: None,
        512: (160, 128, 2, 1, 4),
        896: None,
        1024: (160, 128, 1, 1, 0),
        6144: None,
        8704: (112, 192, 2, 1, 0),
    },
    (6144, 1024): {
        128: None,
        160: (128, 80, 1, 1, 5),
        192: (144, 64, 1, 1, 0),
        224: (192, 56, 1, 1, 1),
        256: (96, 128, 2, 1, 4),
        480: None,
        512: (96, 128, 2, 1, 0),
        6144: None,
        8704: (176, 128, 1, 2, 2),
    },
    (6144, 4096): {
        128: None,
        160: (128, 80, 1, 1, 5),
        192: (192, 48, 1, 1, 1),
        224: (128, 112, 1, 1, 5),
        256: None,
        288: (192, 72, 1, 1, 1),
        320: (192, 80, 1, 1, 1),
        352: (192, 88, 1, 1, 1),
        384: None,
        416: (192, 104, 2, 1, 1),
        448: (192, 112, 1, 2, 1),
        512: None,
        640: (192, 160, 1, 2, 5),
        1024: None,
        1280: (240, 128, 1, 2, 4),
        1408: None,
        1664: (128, 152, 1, 1, 1),
        3072: None,
        4096: (152, 128, 1, 1, 0),
        6144: None,
        8704: (176, 128, 1, 1, 0),
    },
    (28672, 4096): {
        160: None,
        192: (112, 192, 1, 1, 0),
        224: None,
        256: (224, 128, 1, 1, 4),
        288: (128, 144, 2, 2, 3),
        320: (112, 320, 1, 1, 6),
        416: None,
        448: (128, 112, 1, 2, 1),
        480: (176, 128, 1, 2, 2),
        512: None,
        640: (128, 160, 1, 2, 1),
        768: (112, 128, 2, 1, 0),
        896: (128, 128, 2, 1, 1),
        1024: (176, 128, 1, 2, 2),
        1280: (168, 128, 1, 2, 0),
        1408: (176, 128, 2, 1, 0),
        1664: (128, 168, 2, 1, 3),
        1792: (128, 128, 1, 2, 2),
        2048: (176, 128, 1, 2, 2),
        3072: None,
        4096: (128, 152, 2, 1, 1),
        6144: None,
        8704: (128, 128, 1, 2, 3),
    },
}
"""Results in bf16."""

BF16_WIDE: Table = {
    (128256, 4096): {
        112: None,
        128: (216, 64, 1, 2, 0),
        224: None,
        256: (152, 128, 1, 2, 2),
        288: (128, 144, 2, 1, 1),
        320: None,
        352: (128, 88, 1, 2, 1),
        384: (128, 128, 2, 1, 1),
        416: (64, 208, 2, 1, 1),
        448: None,
        480: (128, 160, 2, 1, 1),
        512: (144, 128, 1, 2, 0),
    },
    (151936, 1024): {
        16: None,
        32: (64, 32, 2, 1, 1),
        48: (128, 48, 1, 1, 1),
        64: (144, 64, 2, 1, 0),
        80: None,
        96: (128, 96, 2, 1, 1),
        112: (192, 56, 1, 2, 1),
        128: (144, 128, 2, 1, 0),
        160: (128, 80, 1, 2, 1),
        192: (96, 192, 1, 1, 0),
        224: (128, 112, 1, 2, 3),
        256: (144, 128, 1, 2, 2),
    },
    (151936, 2048): {
        16: None,
        32: (64, 32, 2, 1, 1),
        112: None,
        128: (96, 128, 2, 1, 2),
        224: None,
        256: (144, 128, 1, 2, 2),
    },
}
"""Results in float32: a head's scores."""


def measured(weight: Tensor, bias: Tensor | None = None, *, wide: bool = False) -> ChosenProduct:
    """The product with this weight, with what was measured for its size on this chip. Nothing was with a bias, which
    the library would add in the same kernel."""
    outputs, inputs = weight.shape
    table = BF16_WIDE if wide else BF16
    is_known = (outputs, inputs) in table and bias is None and weight.dtype == torch.bfloat16 and weight.is_contiguous()
    has_any = is_known and weight.is_cuda and torch.cuda.get_device_capability(weight.device) == MEASURED_ON
    return ChosenProduct(weight, table[outputs, inputs] if has_any else {}, wide=wide)
