// Runs one generation: sends the request and writes what arrives into a node of the tree.

import { stream } from "../common/api.js";

const MAX_TOKENS_KEPT = 4000;  // Token probabilities beyond this many are not kept.

/** `onChange` is called after each event. Resolves when the answer has ended, also with an error or after a stop. */
export async function generate(node, body, signal, onChange) {
  const path = "prompt" in body ? "/v1/completions" : "/v1/chat/completions";
  const sentAt = performance.now();
  const stats = node.stats = { ttft: null, seconds: 0, rate: null, prompt: null, cached: null, output: 0 };
  let firstAt = null, firstOutput = 0;
  Object.assign(node, { status: "running", error: null, finish: null });
  const onEvent = event => {
    const now = performance.now();
    const choice = event.choices?.[0];
    if (choice) applyDelta(node, choice);
    if (event.usage) Object.assign(stats, { prompt: event.usage.prompt_tokens, cached: event.usage.prompt_tokens_details?.cached_tokens ?? 0, output: event.usage.completion_tokens });
    const hasText = choice && (choice.text || choice.delta?.content || choice.delta?.reasoning_content || choice.delta?.reasoning || choice.delta?.tool_calls);
    if (hasText && firstAt === null) { firstAt = now; stats.ttft = (now - sentAt) / 1000; firstOutput = stats.output || 1; }
    if (choice && firstAt !== null) {
      stats.seconds = (now - sentAt) / 1000;
      if (now > firstAt && stats.output > firstOutput) stats.rate = (stats.output - firstOutput) / ((now - firstAt) / 1000);
    }
    onChange();
  };
  try {
    await stream(path, { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } },
      { signal, onStart: id => { node.requestId = id; onChange(); }, onEvent });
    node.status = "done";
  } catch (error) {
    if (error.name === "AbortError") Object.assign(node, { status: "stopped", finish: "stopped" });
    else Object.assign(node, { status: "failed", error: { message: error.message, status: error.status ?? 0, code: error.code ?? null, param: error.param ?? null } });
  }
  onChange();
}

function applyDelta(node, choice) {
  const delta = choice.delta ?? {};
  const text = delta.content ?? choice.text;  // A completion has the text itself.
  if (text) node.content += text;
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) node.reasoning = (node.reasoning ?? "") + thought;
  for (const part of delta.tool_calls ?? []) {
    const calls = node.toolCalls ??= [];
    const call = calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" };
    if (part.id) call.id = part.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  for (const entry of choice.logprobs?.content ?? []) {
    const tokens = node.tokens ??= [];
    if (tokens.length < MAX_TOKENS_KEPT) tokens.push(compact(entry)); else node.tokensCut = true;
  }
  if (choice.finish_reason) node.finish = choice.finish_reason;
}

/** { t: text, p: log-probability, b: bytes where the text is not whole characters, top: alternatives }. */
function compact(entry) {
  const short = one => ({ t: one.token, p: Math.round(one.logprob * 1e4) / 1e4, ...(one.bytes && one.token.includes("\ufffd") ? { b: one.bytes } : {}) });
  return { ...short(entry), top: (entry.top_logprobs ?? []).map(short) };
}
