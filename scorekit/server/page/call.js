// Requests to the service that the page came from, and what went wrong with one in a line.

// Behind a proxy with a prefix the page is not at the root, and no route is.
const BASE = location.origin + location.pathname.replace(/\/*$/, "/");
const KEY_NAME = "scorekit-key";

/** The key is kept until the tab is closed, and goes nowhere but to this service. */
const key = {
  value: "",
  load() {
    try {
      this.value = sessionStorage.getItem(KEY_NAME + BASE) ?? "";
    } catch {
      this.value = ""; // storage is forbidden here: it stays in memory
    }
  },
  set(value) {
    this.value = value;
    try {
      sessionStorage.setItem(KEY_NAME + BASE, value);
    } catch {
      // as above
    }
  },
};

/** A request that failed. status: 0 where there was no answer. retryAfter: seconds, or null. */
class CallError extends Error {
  constructor(status, message, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }

  get again() {
    return [0, 401, 408, 429].includes(this.status) || this.status >= 500; // 401: with another key
  }
}

const MEANS = {
  401: "The key is missing or wrong",
  403: "The service does not answer to this address",
  408: "The request took too long to arrive",
  413: "Too large for this service",
  422: "The service does not take this",
  429: "The service is full now",
  500: "A bug of the service",
  503: "The service takes no work now",
  504: "Not answered in time",
};

/** The answer to a request. body: an object, sent as JSON; null: GET. */
async function call(path, body = null, signal = null) {
  const headers = key.value ? { Authorization: `Bearer ${key.value}` } : {};
  const request = { headers, signal, cache: "no-store", redirect: "error" };
  if (body !== null) {
    headers["Content-Type"] = "application/json";
    Object.assign(request, { method: "POST", body: JSON.stringify(body) });
  }
  let response;
  try {
    response = await fetch(BASE + path, request);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new CallError(0, `No answer from ${BASE}: the service is down, or the network is.`);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function callJson(path, body = null, signal = null) {
  const response = await call(path, body, signal);
  try {
    return await response.json();
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new CallError(0, "The answer broke off, or is no JSON.");
  }
}

/** The bytes of a file, as JSON can have them. */
async function inBase64(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return btoa(text);
}

async function refusal(response) {
  const seconds = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  let told = "";
  try {
    told = String((await response.json()).error.message);
  } catch {
    told = "the answer says no more"; // of a proxy, say
  }
  if (response.status === 401) ask.open();
  const what = MEANS[response.status] ?? "Refused";
  const after = Number.isNaN(seconds) ? null : seconds;
  return new CallError(response.status, `${what} (${response.status}): ${told}`, after);
}

/** A line that says what went wrong, with a countdown and a button where it may go better later. */
function faultLine() {
  const line = el("div", { class: "fault", role: "alert", hidden: true });
  let timer = 0;
  const clear = () => {
    clearInterval(timer);
    line.hidden = true;
    line.replaceChildren();
  };
  const show = (error, again = null, where = "") => {
    clear();
    line.hidden = false;
    line.append(el("span", {}, where + error.message));
    if (!again || !(error instanceof CallError) || !error.again) return;
    const retry = button("Try again", () => (clear(), again()));
    line.append(" ", retry);
    if (error.retryAfter) timer = countDown(line, retry, error.retryAfter);
  };
  return { line, clear, show };
}

/** Requests of a form, one at a time: `start(work)` gives up what was begun before, and `line` says
 * that `work(signal)` is waited for. */
function oneAtATime(fault) {
  const line = el("p", { class: "quiet", role: "status", hidden: true }, "Waiting for the service …");
  let latest = null;
  const start = async (work) => {
    latest?.abort();
    const mine = (latest = new AbortController());
    fault.clear();
    line.hidden = false;
    try {
      await work(mine.signal);
    } catch (error) {
      if (latest === mine) fault.show(error, () => start(work));
    }
    if (latest === mine) line.hidden = true;
  };
  return { line, start };
}

function countDown(line, retry, seconds) {
  // Not read aloud each second: the line itself is an alert.
  const left = el("span", { class: "left", "aria-live": "off" });
  const timer = setInterval(() => tell(--seconds), 1000);
  const tell = () => {
    left.textContent = seconds > 0 ? ` in ${seconds} s` : "";
    retry.disabled = seconds > 0;
    if (seconds <= 0) clearInterval(timer);
  };
  tell();
  line.append(left);
  return timer;
}

/** The form for the key: shown when the service wants one. */
const ask = {
  form: null,
  build(done) {
    const input = el("input", { type: "password", name: "key", autocomplete: "off" });
    const given = (event) => {
      event.preventDefault();
      key.set(input.value.trim());
      input.value = "";
      this.form.hidden = true;
      done();
    };
    const hint = "Kept in this tab until it is closed, and sent to this service alone.";
    this.form = el(
      "form",
      { class: "key panel", hidden: true, on: { submit: given } },
      field("API key of this service", input, hint),
      el("button", { type: "submit" }, "Use it"),
    );
    return this.form;
  },
  open() {
    if (!this.form.hidden) return;
    this.form.hidden = false;
    this.form.querySelector("input").focus();
  },
};
