// The charts of the dashboard: which series of /v1/stats each one shows.

import { Chart } from "./chart.js";
import { count, milliseconds, seconds, share } from "./format.js";
import { el } from "../common/dom.js";

const line = (label, color, pick) => ({ label, color, pick });
const percentiles = name => ["p50", "p95", "p99"].map((one, number) => line(one, String(number + 1), series => series[name]?.[one]));
const classes = name => ["interactive", "standard", "batch"].map((one, number) => line(one, String(number + 1), series => series[name]?.[one]));
const perLimit = (name, limit) => [line("of the machine", "1", (series, limits) => series[name]?.map(value => (value === null ? null : value / limits[limit])))];

const GROUPS = [
  ["Latency", [
    ["Time to first token", { format: seconds, latency: "ttft_s" }, percentiles("ttft_s")],
    ["Time per output token", { format: seconds, latency: "tpot_s" }, percentiles("tpot_s")],
    ["Time in the queue", { format: seconds, latency: "queue_s" }, percentiles("queue_s")],
  ]],
  ["Throughput", [
    ["Tokens per second", { format: count }, [line("input", "1", series => series.input_tokens_per_s), line("cached", "3", series => series.cached_tokens_per_s), line("output", "2", series => series.output_tokens_per_s)]],
    ["Requests per second", { format: count }, [line("ended", "1", series => series.requests_per_s)]],
    ["Useful tokens", { format: share, isShare: true, note: "of computed tokens" }, [line("useful", "1", series => series.goodput_share)]],
    ["Wasted tokens", { format: share, stacked: true, note: "of computed tokens" }, [["cancelled", "bad"], ["rejected_drafts", "2"], ["recomputed", "4"], ["padding", "3"]].map(([cause, color]) => line(cause.replace("_", " "), color, series => series.wasted_share?.[cause]))],
    ["Errors per second", { format: count }, [line("errors", "bad", series => series.errors_per_s), line("refused", "2", series => series.refused_per_s)]],
  ]],
  ["Scheduling", [
    ["Running, by class", { format: count, stacked: true }, classes("running_by_class")],
    ["Waiting, by class", { format: count, stacked: true }, classes("waiting_by_class")],
    ["Time of a step", { format: milliseconds, stacked: true, note: "mean" }, ["plan", "launch", "device", "apply"].map((one, number) => line(one, String(number + 1), series => series.step_ms?.[one]))],
  ]],
  ["KV cache", [
    ["KV pool", { format: share, isShare: true, stacked: true }, [line("used", "1", series => series.kv_share?.used), line("cached", "3", series => series.kv_share?.cached)]],
    ["Prefix hit rate", { format: share, isShare: true, note: "of looked-up prompt tokens" }, [line("hits", "1", series => series.prefix_hit_rate)]],
    ["Host memory", { format: share, isShare: true, needs: data => data.now.kv_blocks?.host?.total > 0 }, [line("used", "1", series => series.kv_share?.host_used)]],
    ["KV on the disk", { format: share, isShare: true, needs: data => data.now.kv_blocks?.disk?.total > 0 }, [line("used", "1", series => series.kv_share?.disk_used)]],
    ["Evictions and preemptions per second", { format: count }, [line("evictions", "1", series => series.evictions_per_s), line("preemptions", "2", series => series.preemptions_per_s)]],
  ]],
  ["Device", [
    ["Memory bandwidth in use", { format: share, isShare: true, needs: data => data.limits.bytes_per_s > 0 }, perLimit("bytes_per_s", "bytes_per_s")],
    ["Memory traffic", { format: count, needs: data => !(data.limits.bytes_per_s > 0), note: "bytes/s; limit not known" }, [line("achieved", "1", series => series.bytes_per_s)]],
    ["Compute in use", { format: share, isShare: true, needs: data => data.limits.flops > 0 }, perLimit("flops", "flops")],
    ["Compute", { format: count, needs: data => !(data.limits.flops > 0), note: "FLOP/s; limit not known" }, [line("achieved", "1", series => series.flops)]],
    ["Draft acceptance", { format: share, isShare: true, needs: data => data.totals.drafted_tokens > 0 }, [line("accepted", "1", series => series.draft_acceptance)]],
    ["Tokens in a step", { format: count, stacked: true, note: "mean" }, [line("decode", "1", series => series.decode_tokens_per_step), line("prefill", "2", series => series.prefill_tokens_per_step)]],
  ]],
];

const isPhone = () => matchMedia("(max-width: 44rem)").matches;

export class Panels {
  constructor(container) {
    this.groups = GROUPS.map(([title, charts], number) => {
      const grid = el("div", { class: "charts" });
      const names = el("span"), showAll = el("button", { type: "button", class: "link" }, "Show");
      const folded = el("p", { class: "folded soft", hidden: true }, names, " ", showAll);
      const group = { folded, names, isUnfolded: false, panels: [] };
      showAll.addEventListener("click", () => { group.isUnfolded = true; this.update(this.data); });
      // A phone shows one group at first: the others are a tap away.
      container.append(el("details", { class: "group", open: !isPhone() || number === 0 }, el("summary", {}, el("h2", {}, title)), grid, folded));
      for (const [name, options, lines] of charts) {
        const chart = new Chart(name, options);
        grid.append(chart.root);
        group.panels.push({ name, chart, lines, latency: options.latency, needs: options.needs ?? (() => true) });
      }
      return group;
    });
  }

  update(data) {
    this.data = data;
    const none = data.series.time.map(() => null);
    for (const group of this.groups) {
      const empty = [];
      for (const { name, chart, lines, latency, needs } of group.panels) {
        chart.root.hidden = !needs(data);
        if (chart.root.hidden) continue;
        const measured = data.latency?.[latency];
        chart.update(data.series.time, lines.map(one => ({ ...one, values: one.pick(data.series, data.limits) ?? none })), measured?.points ?? null, measured ? [measured.p50, measured.p95, measured.p99] : null);
        if (!chart.isEmpty || group.isUnfolded) continue;
        chart.root.hidden = true;
        empty.push(name);
      }
      group.folded.hidden = !empty.length;
      group.names.textContent = `Nothing in this time: ${empty.join(", ")}.`;
    }
  }
}
