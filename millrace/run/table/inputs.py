"""Gathers a step's model inputs from the request table: one upload of packed columns, the rest on the device.

On a CPU the table is read with NumPy: a step of one token must not cost dozens of tensor ops.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millrace.models.adapters.slots import AdapterSlots
from millrace.models.batch import ForwardBatch, LastTokens
from millrace.ops.attention.rows import PlainRows, plain_rows
from millrace.plan.step import Int32s, Int64s
from millrace.run.device.device import Device
from millrace.run.table.batch import StepRows
from millrace.run.table.request_table import ON_DEVICE, RequestTable


def gather_inputs(
    step: StepRows, table: RequestTable, device: Device, block_size: int, slots: AdapterSlots | None = None
) -> ForwardBatch:
    """`slots`: of the adapters that some of the rows have."""
    batch = (
        _gather_on_host(step, table, block_size) if device.kind == "cpu" else _gather(step, table, device, block_size)
    )
    if slots is not None:
        batch.adapters = slots.step(device.upload(np.repeat(table.adapters[step.rows], step.counts)))
    return batch


def _gather(step: StepRows, table: RequestTable, device: Device, block_size: int) -> ForwardBatch:
    seq_lens = step.starts + step.counts
    query_starts = np.zeros(len(step.rows) + 1, np.int32)
    np.cumsum(step.counts, out=query_starts[1:])
    token_rows = np.repeat(step.rows, step.counts)
    offsets = np.arange(query_starts[-1], dtype=np.int32) - np.repeat(query_starts[:-1], step.counts)
    positions = np.repeat(step.starts, step.counts) + offsets
    tokens = host_tokens(step, table, query_starts)
    parts = (tokens, token_rows, positions, query_starts, seq_lens, step.rows)
    tokens_in, rows_of, places, starts_d, lens_d, rows_d = _upload(parts, device)
    rows_of, places = rows_of.long(), places.long()
    tokens_in = tokens_in.long()
    token_ids = torch.where(tokens_in == ON_DEVICE, table.last_tokens[rows_of], tokens_in)
    width = -(-int(seq_lens.max()) // block_size)
    return ForwardBatch(
        token_ids=token_ids,
        positions=places,
        block_ids=table.block_tables[:, rows_of, places // block_size].long().contiguous(),
        offsets=places % block_size,
        rows=PlainRows(
            starts_d,
            lens_d,
            table.block_tables[:, rows_d.long(), :width].contiguous(),
            query_starts_host=query_starts.tolist(),
            seq_lens_host=seq_lens.tolist(),
        ),
    )


def _gather_on_host(step: StepRows, table: RequestTable, block_size: int) -> ForwardBatch:
    seq_lens = step.starts + step.counts
    query_starts = np.zeros(len(step.rows) + 1, np.int32)
    np.cumsum(step.counts, out=query_starts[1:])
    rows_of, positions = step.rows, step.starts.astype(np.int64)
    num_tokens = int(query_starts[-1])
    if num_tokens != len(step.rows):
        rows_of = np.repeat(step.rows, step.counts)
        positions = np.arange(num_tokens) + np.repeat(positions - query_starts[:-1], step.counts)
    tokens = host_tokens(step, table, query_starts)
    token_ids = np.where(tokens == ON_DEVICE, table.last_tokens.numpy()[rows_of], tokens)
    # Kernels read a group's blocks as contiguous, which NumPy's indexing does not ensure.
    tables = table.block_tables.numpy()
    width = -(-int(seq_lens.max()) // block_size)
    return ForwardBatch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        block_ids=torch.from_numpy(np.ascontiguousarray(tables[:, rows_of, positions // block_size], np.int64)),
        offsets=torch.from_numpy(positions % block_size),
        rows=PlainRows(
            torch.from_numpy(query_starts),
            torch.from_numpy(seq_lens),
            torch.from_numpy(np.ascontiguousarray(tables[:, step.rows, :width])),
            query_starts_host=query_starts.tolist(),
            seq_lens_host=seq_lens.tolist(),
        ),
        decodes=positions >= table.num_prompt[rows_of],
    )


def last_tokens(batch: ForwardBatch, due: Int64s, device: Device) -> LastTokens:
    """The last tokens of the rows with index `due` in the batch."""
    rows = plain_rows(batch.rows)
    index = np.asarray(rows.query_starts_host, np.int64)[due + 1] - 1
    chosen, kept = device.upload(np.stack([index, due]).astype(np.int32)).long()
    own = PlainRows(
        torch.arange(len(due) + 1, dtype=torch.int32, device=device.torch_device),
        rows.seq_lens[kept],
        rows.block_tables[:, kept],
        query_starts_host=list(range(len(due) + 1)),
        seq_lens_host=[rows.seq_lens_host[row] for row in due.tolist()],
    )
    return LastTokens(chosen, own)


def host_tokens(step: StepRows, table: RequestTable, query_starts: Int32s) -> Int32s:
    """Token ids known to the host; ON_DEVICE for rows that read the token drawn in the previous step."""
    tokens = np.full(int(query_starts[-1]), ON_DEVICE, np.int32)
    from_host = np.flatnonzero(step.starts < table.num_admitted[step.rows])
    for index in from_host.tolist():
        start, count = int(step.starts[index]), int(step.counts[index])
        known = table.host_part(int(step.rows[index]), start, count)
        first = int(query_starts[index])
        tokens[first : first + len(known)] = known
    return tokens


def _upload(parts: tuple[Int32s, ...], device: Device) -> list[Tensor]:
    packed = device.upload(np.concatenate(parts))
    return list(torch.split(packed, [len(part) for part in parts]))
