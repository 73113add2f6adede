"""The request table: what is known of every running request, by row. The one owner of the rows' tokens in `run`.

A row is written when its request is admitted; each plan brings updates. A row's newest token is in `last_tokens` until
the host receives it, and the next step reads it from there.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from millrace.params.rows import DEFAULT_ROW_PARAMS, RowParams
from millrace.plan.step import Admission, Int32s, StepPlan
from millrace.run.device.device import Device

ON_DEVICE = -1
"""Placeholder in the host's token column: the token was drawn on the device and is read from `last_tokens`."""
_NO_TOKENS = np.zeros(0, np.int32)


class RequestTable:
    def __init__(self, device: Device, *, max_rows: int, max_blocks: int, num_groups: int = 1) -> None:
        self.device = device
        torch_device = device.torch_device
        self.block_tables = torch.zeros((num_groups, max_rows, max_blocks), dtype=torch.int32, device=torch_device)
        """Block ids by KV group, row and column."""
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=torch_device)
        self.tokens: list[Int32s] = [_NO_TOKENS] * max_rows
        """The table's own arrays, with room up to the limit. The first `known` tokens are the row's; drafts of the
        current step may follow. Only `admit`, `append` and `release` write them, and drafting writes its drafts."""
        self.known = np.zeros(max_rows, np.int64)
        """Tokens here. Where nobody on the host reads them, tokens drawn since admission are missing."""
        self.computed = np.zeros(max_rows, np.int64)
        """Where drafters follow the row: tokens that the target has computed. Less than all but the last while a prompt
        is computed in parts."""
        self.limit = np.zeros(max_rows, np.int64)
        """`Admission.limit`."""
        self.num_admitted = np.zeros(max_rows, np.int32)
        """A step reads the tokens before this position from the host and later ones from `last_tokens`."""
        self.num_prompt = np.zeros(max_rows, np.int32)
        self.request_ids = np.zeros(max_rows, np.int64)
        self.adapters = np.zeros(max_rows, np.int32)
        """`Admission.adapter`."""
        self.params: list[RowParams] = [DEFAULT_ROW_PARAMS] * max_rows
        self._has_text = np.zeros(max_rows, np.bool_)
        self._device_texts: dict[int, Tensor] | None = None if device.kind == "cpu" else {}
        """int64, by row with a text. None: the tokens above are in the device's memory."""

    # -- rows ------------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan) -> None:
        """Apply the plan's releases, admissions, appended tokens and block-table updates."""
        self.update_host(plan)
        self._send_blocks(plan, len(plan.block_ids))

    def update_host(self, plan: StepPlan) -> None:
        """The same without the block-table updates, which reach the device with the packet."""
        for release in plan.released:
            self.release(release.row)
        for admission in plan.admitted:
            self.admit(admission)
        for appended in plan.appended:
            self.append(appended.row, appended.start, appended.tokens)
            self.num_admitted[appended.row] = appended.start + len(appended.tokens)

    def admit(self, admission: Admission) -> None:
        """Replaces what the row held."""
        row, num_known = admission.row, len(admission.tokens)
        self.tokens[row] = tokens = np.zeros(max(admission.limit, num_known) + 1, np.int32)
        tokens[:num_known] = admission.tokens
        self.known[row] = self.num_admitted[row] = num_known
        self.computed[row], self.limit[row] = admission.num_computed, admission.limit
        self.num_prompt[row] = admission.num_prompt
        self.request_ids[row] = admission.request_id
        self.adapters[row] = admission.adapter
        self.params[row] = admission.row_params
        self._drop_text(row)

    def append(self, row: int, start: int, tokens: Int32s) -> None:
        """The row's tokens from `start` on. Those between the known ones and `start` were drawn and are computed."""
        end = start + len(tokens)
        if end > len(self.tokens[row]):
            grown = np.zeros(2 * end, np.int32)
            grown[: len(self.tokens[row])] = self.tokens[row]
            self.tokens[row] = grown
        self.tokens[row][start:end] = tokens
        self.known[row] = end

    def append_each(self, rows: Int32s, tokens: Int32s) -> None:
        """One token to each of these rows."""
        for row, known, token in zip(rows.tolist(), self.known[rows].tolist(), tokens.tolist(), strict=True):
            self.tokens[row][known] = token
        self.known[rows] += 1

    def release(self, row: int) -> None:
        self.tokens[row] = _NO_TOKENS
        self.known[row] = self.computed[row] = self.limit[row] = 0
        self.adapters[row] = 0
        self._drop_text(row)

    def known_tokens(self, row: int) -> Int32s:
        """A view: valid until the row's tokens change."""
        return self.tokens[row][: self.known[row]]

    def host_part(self, row: int, start: int, count: int) -> Int32s:
        """Of `count` tokens from `start` on, those that a step reads from the host: the first ones."""
        return self.tokens[row][start : min(start + count, int(self.num_admitted[row]))]

    # -- texts: tokens that a draw reads on the device ---------------------------------------------------------------

    def keep_text(self, admission: Admission) -> None:
        """The draws of this row depend on all its tokens: keep them where they are drawn."""
        self._has_text[admission.row] = True
        if self._device_texts is not None:
            room = np.zeros(max(admission.limit, len(admission.tokens)) + 1, np.int64)
            room[: len(admission.tokens)] = admission.tokens
            self._device_texts[admission.row] = self.device.upload(room)

    def text(self, row: int, end: int) -> Tensor:
        """int64, on the device: the tokens before position `end` of a row with a text."""
        if self._device_texts is not None:
            return self._device_texts[row][:end]
        return torch.from_numpy(self.tokens[row][:end]).long()

    def append_drawn(self, rows: Int32s, positions: Int32s, tokens: Tensor) -> None:
        """These tokens were drawn, one for each row. Rows without a text ignore them: nobody reads them here."""
        for index in np.flatnonzero(self._has_text[rows]).tolist():
            row, at, token = int(rows[index]), int(positions[index]), tokens[index : index + 1]
            if self._device_texts is None:
                self.append(row, at, token.numpy().astype(np.int32))
                continue
            text = self._device_texts[row]
            if at >= len(text):
                text = self._device_texts[row] = torch.nn.functional.pad(text, (0, at + 1))
            text[at : at + 1] = token

    def _drop_text(self, row: int) -> None:
        self._has_text[row] = False
        if self._device_texts:
            self._device_texts.pop(row, None)

    # -- block tables ----------------------------------------------------------------------------------------------

    def send_excess_blocks(self, plan: StepPlan, limit: int) -> int:
        """Send the plan's block-table updates but the last `limit` ones now. Returns how many were sent."""
        return self._send_blocks(plan, max(0, len(plan.block_ids) - limit))

    def _send_blocks(self, plan: StepPlan, count: int) -> int:
        """Send the first `count` updates."""
        if count:
            columns = (self.updated_rows(plan), plan.block_cols, plan.block_ids)
            sent = self.device.upload(np.stack([column[:count] for column in columns]))
            self.block_tables.flatten(0, 1)[sent[0].long(), sent[1].long()] = sent[2]
        return count

    def updated_rows(self, plan: StepPlan) -> Int32s:
        """The rows of the plan's block-table updates among the rows of all groups: group * number of rows + row."""
        if plan.block_groups is None:
            return plan.block_rows
        return plan.block_groups * np.int32(self.block_tables.shape[1]) + plan.block_rows
