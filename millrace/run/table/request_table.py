"""The request table: what the device knows of every running request, by row.

A row is written when its request is admitted; each plan brings updates. A row's newest token is only here until the
host receives it, and the next step reads it from here.
"""

from __future__ import annotations

import numpy as np
import torch

from millrace.params import DEFAULT_ROW_PARAMS, RowParams
from millrace.plan.step import Admission, Appended, Int32s, StepPlan
from millrace.run.device.device import Device

ON_DEVICE = -1
"""Placeholder in the host's token column: the token was drawn on the device and is read from `last_tokens`."""


class RequestTable:
    def __init__(self, device: Device, *, max_rows: int, max_blocks: int, num_groups: int = 1) -> None:
        self._device = device
        torch_device = device.torch_device
        self.block_tables = torch.zeros((num_groups, max_rows, max_blocks), dtype=torch.int32, device=torch_device)
        """Block ids by KV group, row and column."""
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=torch_device)
        self.num_admitted = np.zeros(max_rows, np.int32)
        """Tokens after so many were drawn on the device. Of those before, the host knows the ones at admission, and
        those that were appended."""
        self.num_prompt = np.zeros(max_rows, np.int32)
        self.tokens: list[Int32s] = [np.zeros(0, np.int32)] * max_rows
        self.request_ids = np.zeros(max_rows, np.int64)
        self.params: list[RowParams] = [DEFAULT_ROW_PARAMS] * max_rows

    def update(self, plan: StepPlan) -> None:
        """Apply the plan's admissions and block-table updates."""
        self.update_host(plan)
        self._send_blocks(plan, len(plan.block_ids))

    def update_host(self, plan: StepPlan) -> None:
        """Apply only the admissions and appended tokens; the block-table updates reach the device with the packet."""
        for admission in plan.admitted:
            self._admit(admission)
        for appended in plan.appended:
            self._append(appended)

    def send_excess_blocks(self, plan: StepPlan, limit: int) -> int:
        """Send the plan's block-table updates but the last `limit` ones now. Returns how many were sent."""
        return self._send_blocks(plan, max(0, len(plan.block_ids) - limit))

    def _send_blocks(self, plan: StepPlan, count: int) -> int:
        """Send the first `count` updates."""
        if count:
            columns = (self.updated_rows(plan), plan.block_cols, plan.block_ids)
            sent = self._device.upload(np.stack([column[:count] for column in columns]))
            self.block_tables.flatten(0, 1)[sent[0].long(), sent[1].long()] = sent[2]
        return count

    def updated_rows(self, plan: StepPlan) -> Int32s:
        """The rows of the plan's block-table updates among the rows of all groups: group * number of rows + row."""
        if plan.block_groups is None:
            return plan.block_rows
        return plan.block_groups * np.int32(self.block_tables.shape[1]) + plan.block_rows

    def _admit(self, admission: Admission) -> None:
        row = admission.row
        self.num_admitted[row] = len(admission.tokens)
        self.num_prompt[row] = admission.num_prompt
        self.tokens[row] = admission.tokens
        self.request_ids[row] = admission.request_id
        self.params[row] = admission.row_params

    def _append(self, appended: Appended) -> None:
        row, end = appended.row, appended.start + len(appended.tokens)
        if len(self.tokens[row]) < end:
            # The tokens in between were drawn on the device and are computed.
            grown = np.full(end, ON_DEVICE, np.int32)
            grown[: len(self.tokens[row])] = self.tokens[row]
            self.tokens[row] = grown
        self.tokens[row][appended.start : end] = appended.tokens
        self.num_admitted[row] = end
