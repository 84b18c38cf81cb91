// Many samples: sent in pieces, shown as they come, sorted, filtered, downloaded.

const PIECE = 100;

/** Indexes of the items without a result, in pieces that the service takes. */
function* pieces(items, most, bytes) {
  let [piece, size] = [[], 0];
  for (const [k, { sample, result }] of items.entries()) {
    if (result !== null) continue;
    const own = new TextEncoder().encode(JSON.stringify(sample)).length + 2;
    if (piece.length && (piece.length === most || size + own > bytes)) {
      yield piece;
      [piece, size] = [[], 0];
    }
    piece.push(k);
    size += own;
  }
  if (piece.length) yield piece;
}

/** The list of results. `begin(items, request)` scores those without a result; request makes a body of samples. */
function batchView(info) {
  const state = { items: [], request: null, stop: null };
  const fault = faultLine();
  const progress = el("progress", { max: 1, value: 0, "aria-label": "scored" });
  const count = el("span", { role: "status" });
  const stop = button("Stop", () => state.stop?.abort());
  const running = el("div", { class: "running", hidden: true }, progress, " ", stop);
  const meaning = legend();
  const view = resultList(state, info);
  const box = el("section", { class: "results", hidden: true, "aria-label": "Results" }, running, count, fault.line, meaning, view.box);

  function tell() {
    const { items } = state;
    const done = items.filter(({ result }) => result !== null);
    const good = done.filter(({ result }) => result.ok);
    const mean = good.reduce((sum, { result }) => sum + result.score, 0) / good.length;
    progress.value = done.length / items.length;
    count.textContent =
      `${done.length} of ${items.length} answered, ${done.length - good.length} failed` +
      (good.length > 1 ? `; mean score ${shown(mean)} over ${good.length}` : "") +
      (good.length && info().score_range ? `; scores: ${scale(info())}` : "");
    meaning.hidden = !good.some(({ result }) => result.error_spans);
  }

  async function run() {
    state.stop?.abort();
    const mine = (state.stop = new AbortController());
    fault.clear();
    box.hidden = running.hidden = false;
    tell();
    view.draw();
    let piece = [];
    try {
      // A service that was loading, or wanted a key, has not told yet what it takes and which score is good.
      if (!info().service) await learn();
      const { max_samples: most = PIECE, max_body_bytes: bytes = 2 ** 20 } = info();
      for (piece of pieces(state.items, Math.min(PIECE, most), bytes * 0.9)) {
        const samples = piece.map((k) => state.items[k].sample);
        const answer = await callJson("v1/score", state.request(samples), mine.signal);
        if (state.stop !== mine) return; // another request is shown by now
        if (answer.results?.length !== piece.length) throw new CallError(0, "The answer has not as many results as were asked for.");
        piece.forEach((k, n) => (state.items[k].result = answer.results[n]));
        tell();
        view.draw();
      }
    } catch (error) {
      if (state.stop !== mine) return;
      if (mine.signal.aborted) fault.show(new CallError(0, "Stopped. What is left can still be scored."), run);
      else fault.show(error, run, [413, 422].includes(error.status) && state.items.length > 1 ? `${rowsOf(piece)}: ` : "");
    }
    running.hidden = true;
  }

  const begin = (items, request) => {
    state.items = items;
    state.request = request;
    return run();
  };
  return { box, begin };
}

/** The rows of a piece, as they are numbered. */
function rowsOf(piece) {
  const [first, last] = [piece[0] + 1, piece.at(-1) + 1];
  return first === last ? `Row ${first}` : `Rows ${first} to ${last} (samples.0 is row ${first})`;
}

/** Cards of the items, with what sorts, filters and saves them. */
function resultList(state, info) {
  const order = choice("order", [["sent", "as sent"], ["worst", "worst first"], ["best", "best first"]]);
  const filter = choice("filter", [["all", "all"], ["failed", "failed"], ["errors", "with errors"], ["cut", "cut or in windows"]]);
  const list = el("div", { class: "list" });
  const none = el("p", { class: "quiet", hidden: true }, "None of these.");
  const saving = el(
    "div",
    { class: "saving" },
    button("Download CSV", () => download("scores.csv", "text/csv", asCsv(state.items)), {
      title: "For spreadsheets: a text that would be a formula there gets a ' before it",
    }),
    button("Download JSONL", () => download("scores.jsonl", "application/x-ndjson", asJsonl(state.items))),
  );
  const tools = el("div", { class: "tools" }, field("Order", order), field("Show", filter), saving);

  function draw() {
    const kept = state.items.map((item, k) => ({ ...item, k })).filter(({ result }) => isShown(result, filter.value));
    if (order.value !== "sent") {
      const up = (order.value === "worst") === info().higher_is_better ? 1 : -1;
      // A sample without a score is neither good nor bad: it comes last.
      kept.sort((a, b) => Number(!a.result?.ok) - Number(!b.result?.ok) || up * ((a.result?.score ?? 0) - (b.result?.score ?? 0)));
    }
    tools.hidden = state.items.length < 2;
    none.hidden = kept.length > 0;
    show(kept.map(({ k }) => cardOf(state.items[k], k)));
  }

  /** What has a card keeps it while more is scored: an error that is looked at stays under the eye and the focus. */
  function cardOf(item, k) {
    if (item.drawn !== item.result || !item.card) {
      const made = resultCard(item.sample, item.result, state.items.length > 1 ? k + 1 : null, item.line);
      item.card?.replaceWith(made);
      [item.card, item.drawn] = [made, item.result];
    }
    return item.card;
  }

  function show(cards) {
    cards.forEach((card, n) => {
      if (list.children[n] !== card) list.insertBefore(card, list.children[n] ?? null);
    });
    while (list.children.length > cards.length) list.lastChild.remove();
    if (!pointed?.isConnected) hideTip();
  }

  for (const control of [order, filter]) control.addEventListener("change", draw);
  return { box: el("div", {}, tools, none, list), draw };
}

function isShown(result, filter) {
  if (filter === "all") return true;
  if (filter === "failed") return result !== null && !result.ok;
  if (!result?.ok) return false;
  if (filter === "cut") return Boolean(result.windows) || Object.values(result.truncated ?? {}).some(Boolean);
  return [result.error_spans, result.omissions, result.unplaced].some((found) => found?.length);
}
