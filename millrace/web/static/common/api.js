// The server's public API: the key of this tab, JSON requests, and event streams.

const KEY = "millrace.key";

/** The API key lives in sessionStorage: this tab only, gone when it closes. */
export const getKey = () => sessionStorage.getItem(KEY) ?? "";
export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key); else sessionStorage.removeItem(KEY);
  dispatchEvent(new Event("millrace:key"));
}

export class ApiError extends Error {
  constructor(status, error) {
    super(error.message || `The server answered ${status}.`);
    Object.assign(this, { status, code: error.code ?? null, param: error.param ?? null, type: error.type ?? null });
  }
}

export function headers(extra = {}) {
  const key = getKey();
  return key ? { Authorization: `Bearer ${key}`, ...extra } : extra;
}

async function send(path, { method = "GET", body, signal } = {}) {
  const init = { method, signal, headers: headers(), cache: "no-store", credentials: "same-origin" };
  if (body !== undefined) {
    init.headers["Content-Type"] = "application/json";
    init.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(path, init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server cannot be reached. Check that it is running." });
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let parsed = null;
  try { parsed = JSON.parse(text).error; } catch { /* Not JSON: perhaps a proxy's page. */ }
  if (answer.status === 401) dispatchEvent(new Event("millrace:unauthorised"));
  throw new ApiError(answer.status, parsed && typeof parsed === "object" ? parsed : { message: parsed || text.slice(0, 300) });
}

export const getJson = async (path, options) => (await send(path, options)).json();
export const postJson = async (path, body, options) => (await send(path, { ...options, method: "POST", body })).json();
export const remove = async path => (await send(path, { method: "DELETE" })).json();

/** POST and call `onEvent` with each JSON event of the stream. Resolves when the stream has ended. */
export async function stream(path, body, { signal, onStart, onEvent }) {
  const answer = await send(path, { method: "POST", body, signal });
  onStart?.(answer.headers.get("X-Request-Id"));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.status ?? 0, event.error);
      onEvent(event);
    }
  }
  throw new ApiError(0, { message: "The connection ended before the answer was complete." });
}
