// Requests to the service, and its errors as sentences. The key lives in this module only: memory, nothing else.

let key = "";

export const chosen = {}; // the model, where there are several: goes into every body
export const setKey = (given) => { key = given.trim(); };
export const hasKey = () => key !== "";

export class Failure extends Error {
  // status 0: no answer at all
  constructor(status, { message = "", param = null, code = null } = {}, wait = 0) {
    super(message);
    Object.assign(this, { status, param, code, wait });
  }

  static of(error) {
    if (error instanceof Failure) return error;
    throw error;
  }

  get isGone() { return this.status === 0; }

  get offsets() {
    // Of unknown characters, in code points.
    return [...this.message.matchAll(/ at offset (\d+)/g)].map((found) => Number(found[1]));
  }

  get sentence() {
    const again = this.wait ? ` Try again in ${this.wait} second${this.wait === 1 ? "" : "s"}.` : " Try again.";
    switch (true) {
      case this.isGone: return "The server does not answer. This page keeps asking, and says when it is back.";
      case this.status === 401: return key
        ? "This API key is not valid. Check it at the top right."
        : "This service needs an API key. Type it at the top right.";
      case this.code === "unknown_character": {
        const names = [...this.message.matchAll(/('(?:[^'\\]|\\.)+'|"'") \(U\+/g)].map((found) => found[1].slice(1, -1));
        const list = [...new Set(names)].map((name) => `“${name}”`).join(", ");
        return `The model has never seen ${list || "some of these characters"}, marked above. Replace or remove ${names.length > 1 ? "them" : "it"}.`;
      }
      case this.status === 429: return `The service is busy (${this.message}).${again}`;
      case this.code === "shutting_down": return "The service is shutting down.";
      case this.status === 503: return `The service is not ready (${this.message}).${again}`;
      case this.status === 504: return `That took too long (${this.message}).`;
      case this.status >= 500: return `The service failed (${this.message || this.status}). Trying again may help.`;
    }
    const text = this.message || `status ${this.status}`;
    return text[0].toUpperCase() + text.slice(1) + (/[.!?…]$/.test(text) ? "" : ".");
  }
}

export async function call(path, body, signal) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  if (/[^\x21-\x7e]/.test(key)) throw new Failure(401); // which no header can hold
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify({ ...chosen, ...body }), signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0);
  }
  if (response.ok) {
    document.dispatchEvent(new CustomEvent("answered", { detail: response.headers.get("X-Checkpoint") }));
    return response;
  }
  let details = {};
  try { details = (await response.json()).error; } catch { /* not the service's own body, such as a proxy's */ }
  throw new Failure(response.status, details, Number(response.headers.get("Retry-After")) || 0);
}

export const json = async (path, body, signal) => (await call(path, body, signal)).json();

export async function* events(response) {
  // The objects of a stream of server-sent events.
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try { part = await reader.read(); } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Failure(0);
    }
    if (part.done) return;
    const blocks = (rest + part.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Failure(event.error.code === "timeout" ? 504 : 500, event.error);
      yield event;
    }
  }
}
