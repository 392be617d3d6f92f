"use strict";
// Everything shown comes from the JSON in the page and becomes text nodes and attributes: nothing is parsed as markup.
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const ENDS = ["terminated", "truncated", "cut", "running"];
  const MEANING = {
    terminated: "terminated", truncated: "truncated by a time limit",
    cut: "stopped without an end", running: "still running",
  };

  // Building

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
    return node;
  }
  const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  function num(value) {
    if (value === null || value === undefined) return "–";
    if (Number.isNaN(value)) return "NaN";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en-US").replace("-", "−");
    const size = Math.abs(value);
    const text = size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
    return text.replace(/-/g, "−");
  }
  const plural = (count, word) => `${num(count)} ${word}${count === 1 ? "" : "s"}`;

  // Axes: a tick is [place from 0 to 1, text]. A drawing stretches, so its ticks are text beside it.

  function steps(low, high, most, whole) {
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough * 0.999);
    return whole ? Math.max(1, Math.round(step)) : step;
  }
  function tickText(value, step) {
    if (value === 0) return "0";
    const digits = Math.floor(Math.log10(step) + 1e-9), size = Math.floor(Math.log10(Math.abs(value)) + 1e-9);
    const text = size >= 6 || size < -3 ? value.toExponential(Math.min(Math.max(size - digits, 0), 8))
      : value.toLocaleString("en-US", { minimumFractionDigits: Math.max(-digits, 0), maximumFractionDigits: Math.max(-digits, 0) });
    return text.replace(/-/g, "−");
  }
  // Round numbers between two others.
  function numberTicks(low, high, { most = 5, whole = false } = {}) {
    if (!(high > low)) return [[0.5, num(low)]];
    const step = steps(low, high, most, whole), found = [];
    for (let k = Math.ceil(low / step - 1e-6); k * step <= high + step * 1e-6; k++)
      found.push([(k * step - low) / (high - low), tickText(k * step, step)]);
    return found;
  }
  function placed(ticks, edge) {
    return ticks.map(([at, text]) => {
      const span = el("span", {}, text);
      span.style[edge] = `${100 * at}%`;
      return span;
    });
  }
  function axes(drawing, x, y) {
    const box = el("div", { class: "axes" }, el("span", { class: "name" }, y.name),
      el("div", { class: "yticks", "aria-hidden": "true" }, placed(y.ticks, "bottom")), drawing,
      el("div", { class: "ticks", "aria-hidden": "true" }, placed(x.ticks, "left")), el("span", { class: "name x" }, x.name));
    box.style.setProperty("--room", `${Math.max(...y.ticks.map(([, text]) => text.length), 1)}ch`);
    return box;
  }
  const lines = (ticks) => ticks.map(([at]) => svg("line", { class: "rule", x1: 0, x2: 1000, y1: 100 - 100 * at, y2: 100 - 100 * at }));

  // Plots: a drawing between its axes, a line above it that says what the pointer or the arrow keys are at.

  function figure(title, aside, drawing, items, x, y, pick = null) {
    const readout = el("p", { class: "readout", "aria-live": "polite" }, aside);
    const cursor = svg("line", { class: "cursor", y1: 0, y2: 100, visibility: "hidden" });
    const plot = svg("svg", {
      class: "plot", viewBox: "0 0 1000 100", preserveAspectRatio: "none", tabindex: 0, role: "img",
      "aria-label": `${title}: ${y.name} by ${x.name}. ${aside}. Use the arrow keys to read values.`,
    }, lines(y.ticks), drawing, cursor);
    let at = -1;
    const show = (i) => {
      if (items[at] && items[at].mark) items[at].mark.classList.remove("on");
      at = i;
      const item = items[at];
      readout.textContent = item ? item.text : aside;
      cursor.setAttribute("visibility", item && !item.mark ? "visible" : "hidden");
      if (!item) return;
      if (item.mark) item.mark.classList.add("on");
      cursor.setAttribute("x1", item.x); cursor.setAttribute("x2", item.x);
    };
    const nearest = (event) => {
      const box = plot.getBoundingClientRect(), x = 1000 * (event.clientX - box.left) / box.width;
      let best = 0;
      items.forEach((item, i) => { if (Math.abs(item.x - x) < Math.abs(items[best].x - x)) best = i; });
      return best;
    };
    plot.addEventListener("pointermove", (event) => show(nearest(event)));
    plot.addEventListener("pointerleave", () => show(-1));
    plot.addEventListener("blur", () => show(-1));
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (move) { event.preventDefault(); show(Math.max(0, Math.min(items.length - 1, at < 0 && move < 0 ? items.length - 1 : at + move))); }
      if (event.key === "Enter" && pick && at >= 0) pick(items[at]);
    });
    if (pick) plot.addEventListener("click", (event) => pick(items[nearest(event)]));
    return el("figure", { class: "card" }, el("h3", {}, title), readout, axes(plot, x, y));
  }

  function bars(histogram, of) {
    const { counts } = histogram, most = Math.max(...counts, 1), step = 1000 / counts.length;
    const gap = step - Math.min(step * 0.88, 1000 / 7);
    return counts.map((count, i) => {
      const height = count ? Math.max(98 * count / most, 1.5) : 0;
      const label = histogram.values ? num(histogram.values[i]) : `${num(histogram.edges[i])} to ${num(histogram.edges[i + 1])}`;
      return {
        x: (i + 0.5) * step, text: `${label}: ${plural(count, of)}`, low: histogram.values ? histogram.values[i] : histogram.edges[i],
        high: histogram.values ? histogram.values[i] : histogram.edges[i + 1],
        mark: svg("rect", { class: "bar", x: i * step + gap / 2, width: step - gap, y: 100 - height, height }),
      };
    });
  }

  // Where bars stand for single values each has a tick, or every second, third … where that is too much to read.
  function barTicks(histogram) {
    if (histogram.edges) return numberTicks(histogram.edges[0], histogram.edges[histogram.edges.length - 1]);
    const texts = histogram.values.map(num), every = Math.max(1, Math.ceil(texts.join("").length / 30));
    return texts.map((text, i) => [(i + 0.5) / texts.length, text]).filter((_, i) => i % every === 0);
  }

  function barPlot(title, aside, histogram, name, of, pick) {
    const items = bars(histogram, of), most = Math.max(...histogram.counts, 1);
    const y = { name: `${of}s`, ticks: numberTicks(0, most, { whole: true }).map(([at, text]) => [0.98 * at, text]) };
    return figure(title, aside, items.map((item) => item.mark), items, { name, ticks: barTicks(histogram) }, y, pick);
  }

  function curvePlot(title, aside, curve, name, before = 0) {
    const known = curve.mean.map((mean, i) => ({ mean, low: curve.min[i], high: curve.max[i], from: before + (i ? curve.at[i - 1] : 0) + 1, at: before + curve.at[i] }))
      .filter((p) => p.mean !== null && p.low !== null);
    if (!known.length) return null;
    const low = Math.min(...known.map((p) => p.low)), high = Math.max(...known.map((p) => p.high)), span = high - low;
    const first = known[0].at, last = known[known.length - 1].at;
    const y = (value) => span ? 97 - 94 * (value - low) / span : 50;
    const x = (p) => last > first ? 1000 * (p.at - first) / (last - first) : 500;
    const over = known.map((p) => `${x(p)} ${y(p.high)}`), under = known.map((p) => `${x(p)} ${y(p.low)}`).reverse();
    const items = known.map((p) => {
      const which = p.from === p.at ? `Episode ${num(p.at)}` : `Episodes ${num(p.from)} to ${num(p.at)}`;
      return { x: x(p), text: `${which}: ${p.from === p.at ? num(p.mean) : `mean ${num(p.mean)}, from ${num(p.low)} to ${num(p.high)}`}` };
    });
    const drawing = [svg("path", { class: "band", d: `M${over.join("L")}L${under.join("L")}Z` }),
      svg("path", { class: "line", d: `M${known.map((p) => `${x(p)} ${y(p.mean)}`).join("L")}` })];
    return figure(title, aside, drawing, items, { name, ticks: numberTicks(first, last, { whole: true }) },
      { name: "return", ticks: numberTicks(low, high).map(([at, text]) => [span ? 0.03 + 0.94 * at : 0.5, text]) });
  }

  // Sections

  const main = document.getElementById("main"), nav = document.getElementById("nav");
  function section(id, title, note, ...children) {
    const heading = el("h2", { id: `${id}-title` }, title);
    main.append(el("section", { id, "aria-labelledby": `${id}-title` }, heading, note ? el("p", { class: "note" }, note) : null, children));
    nav.append(el("a", { href: `#${id}` }, title));
  }
  const spread = (moments) => `mean ${num(moments.mean)}, median ${num(moments.median)}`;

  function top() {
    const source = DATA.source, episodes = DATA.episodes || {};
    const when = [source.path || source.id || "in memory", source.saved && `saved ${source.saved}`, `inspected ${DATA.inspected}`];
    main.append(el("h1", {}, source.kind), el("p", { class: "lead" }, when.filter(Boolean).join(" · ")));
    const figures = [];
    const add = (name, value, small) => figures.push(el("div", {}, el("dt", {}, name), el("dd", {}, value, small ? el("small", {}, small) : null)));
    add("rows", num(source.rows), source.capacity ? `of ${num(source.capacity)}` : source.num_steps ? `${num(source.num_stored)} of ${num(source.num_steps)} steps` : null);
    if (episodes.count !== undefined) add("episodes", num(episodes.count), `${num(episodes.whole)} whole`);
    if (episodes.returns) add("mean return", num(episodes.returns.mean), `${num(episodes.returns.min)} to ${num(episodes.returns.max)}`);
    if (episodes.lengths) add("mean length", num(episodes.lengths.mean), `${num(episodes.lengths.min)} to ${num(episodes.lengths.max)}`);
    if (DATA.fit !== null) add("explained variance", num(DATA.fit), "of returns, by values");
    if (DATA.priorities && DATA.priorities.effective !== null) add("effective sample", num(Math.round(DATA.priorities.effective)), `${DATA.texts.effective} of rows`);
    if (DATA.reward) add("reward is 0", DATA.texts.zero, "of rows");
    const memory = DATA.texts.facts.find(([name]) => name === "memory");
    if (memory) add("memory", memory[1], null);
    main.append(el("dl", { class: "figures" }, figures));
    main.append(el("details", { class: "more" }, el("summary", {}, "All facts"),
      el("dl", {}, DATA.texts.facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]))));
    main.append(DATA.warnings.length
      ? el("ul", { class: "warnings", "aria-label": "Warnings" }, DATA.warnings.map((line) => el("li", {}, line)))
      : el("p", { class: "fine" }, "Nothing looks odd."));
  }

  const grid = (cards) => el("div", { class: cards.length % 3 === 1 || cards.length === 2 ? "grid two" : "grid" }, cards);

  function endsCard(counts, texts, reasons) {
    const running = counts.running || 0, stopped = ENDS.reduce((sum, name) => sum + (counts[name] || 0), 0) - running;
    let x = 0;
    const bar = svg("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": "How episodes stopped, as shares" },
      ENDS.filter((name) => counts[name] && name !== "running").map((name) => {
        const width = 1000 * counts[name] / stopped;
        const piece = svg("rect", { class: name, x, y: 0, width: Math.max(width - 2, 1), height: 10, stroke: "none" });
        x += width;
        return piece;
      }));
    const line = (kind, what, text) => el("li", {}, el("i", { class: kind }), el("span", { class: "what" }, what), el("b", {}, text));
    const shares = placed([0, 0.25, 0.5, 0.75, 1].map((at) => [at, `${100 * at} %`]), "left");
    return el("figure", { class: "card" }, el("h3", {}, "Ends"),
      el("p", { class: "readout" }, running ? `${num(stopped)} of ${plural(stopped + running, "episode")} stopped` : plural(stopped, "episode")),
      stopped ? [el("div", { class: "ends" }, bar), el("div", { class: "ticks", "aria-hidden": "true" }, shares),
        el("span", { class: "name x" }, "share of the episodes that stopped")] : null,
      el("ul", { class: "key" }, ENDS.filter((name) => counts[name]).map((name) => line(name, MEANING[name], texts[name])),
        (reasons || []).map(([name, text]) => line("reason", name, text))));
  }

  function episodes() {
    const found = DATA.episodes, stats = found && found.stats;
    const counted = stats && stats.window;
    // Where the statistics have seen nothing but what is stored, they add the reasons only.
    const apart = counted && (stats.episodes !== found.whole || Object.keys(stats.metrics).length);
    if (found && found.count) {
      const cards = [];
      if (found.returns) {
        cards.push(barPlot("Returns", spread(found.returns), found.returns.histogram, "return", "episode", (item) => openIn(item)));
        cards.push(barPlot("Lengths", spread(found.lengths), found.lengths.histogram, "length in steps", "episode"));
        if (found.curve && found.curve.at.length > 1) cards.push(curvePlot("Return by episode", spread(found.returns), found.curve, "whole episode, oldest first"));
      }
      cards.push(endsCard(found.ends, DATA.texts.ends, counted && !apart ? DATA.texts.reasons : null));
      section("episodes", "Episodes", found.whole === found.count ? null : found.whole
        ? `${num(found.whole)} of ${num(found.count)} are stored from their first step to their end; returns and lengths are of these.`
        : "None is stored from its first step to its end, so that no return is known.",
        grid(cards));
    }
    if (apart) {
      const cards = [];
      if (stats.curve && stats.curve.at.length > 1) cards.push(curvePlot("Return by episode", spread(stats.returns), stats.curve, "episode", stats.episodes - stats.window));
      cards.push(barPlot("Returns", spread(stats.returns), stats.returns.histogram, "return", "episode"),
        barPlot("Lengths", spread(stats.lengths), stats.lengths.histogram, "length in steps", "episode"),
        endsCard({ terminated: stats.terminated, truncated: stats.truncated }, DATA.texts.stats_ends, DATA.texts.reasons));
      for (const [name, moments] of Object.entries(stats.metrics))
        if (moments && moments.histogram) cards.push(barPlot(name, spread(moments), moments.histogram, `${name}, summed over the episode`, "episode"));
      section("statistics", "Statistics", `What was counted while it ran: ${plural(stats.episodes, "episode")} in ${plural(stats.steps, "step")}, stored or not.${stats.window < stats.episodes ? ` Shown are the last ${num(stats.window)}.` : ""}`, grid(cards));
    }
  }

  function actions() {
    const cards = [];
    for (const field of DATA.fields) {
      const head = field.name.split(".")[0];
      if (head !== "action") continue;
      for (const part of (field.dimensions.length ? field.dimensions : [field]).slice(0, 12))
        if (part.histogram) cards.push(barPlot(part.name, `${num(part.min)} to ${num(part.max)}`, part.histogram, part.name, "row"));
    }
    if (DATA.reward && DATA.reward.histogram)
      cards.unshift(barPlot("reward", `0 in ${DATA.texts.zero} of rows`, DATA.reward.histogram, "reward of a step", "row"));
    if (cards.length) section("actions", DATA.reward ? "Rewards and actions" : "Actions", null, grid(cards));
  }

  function spark(histogram, name) {
    if (!histogram) return null;
    return svg("svg", { class: "spark", viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": `Histogram of ${name} from its least to its largest value` },
      bars(histogram, "value").map((item) => item.mark));
  }

  function fieldRow(part, name, form, notes, attributes) {
    return el("tr", attributes, el("td", {}, name), el("td", { class: "left form" }, form),
      ["min", "mean", "max", "std"].map((which) => el("td", {}, num(part[which]))),
      el("td", { class: "left" }, spark(part.histogram, part.name)), el("td", { class: "left flag" }, notes));
  }

  function notes(part, constant) {
    const found = [];
    if (part.nan) found.push(`${num(part.nan)} NaN`);
    if (part.infinite) found.push(`${num(part.infinite)} infinite`);
    if (constant) found.push(constant);
    return found.join(", ");
  }

  function fields() {
    if (!DATA.fields.length) return;
    const body = el("tbody");
    for (const field of DATA.fields) {
      const many = field.dimensions.length > 1;
      const parts = many ? field.dimensions.map((part) => fieldRow(part, part.name, "", notes(part, part.constant && "constant"), { class: "part", hidden: true })) : [];
      const name = many ? el("button", { class: "open", type: "button", "aria-expanded": "false", onclick: (event) => {
        const open = event.currentTarget.getAttribute("aria-expanded") !== "true";
        event.currentTarget.setAttribute("aria-expanded", open);
        parts.forEach((row) => { row.hidden = !open; });
      } }, field.name) : el("span", { class: "open" }, field.name);
      const size = field.shape.reduce((product, side) => product * side, 1);
      const constant = field.constant ? (field.constant === size ? "constant" : `${num(field.constant)} constant`) : null;
      body.append(fieldRow(field, name, `${field.dtype}${field.shape.length ? `[${field.shape.join(", ")}]` : ""}`, notes(field, constant)), ...parts);
    }
    const read = DATA.read;
    section("fields", "Fields", read.rows === read.of ? null
      : `Read from ${num(read.rows)} of ${num(read.of)} rows, in evenly spaced stretches; rewards and ends are of all rows.`,
      el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {},
        ["field", "form", "min", "mean", "max", "std", "min to max", ""].map((name, i) => el("th", { scope: "col", class: i === 1 || i === 6 ? "left" : null }, name)))), body)));
  }

  function priorities() {
    const found = DATA.priorities;
    if (!found || found.effective === null) return;
    const most = Math.log10(found.rows) || 1, place = (rank) => Math.log10(rank) / most;
    const items = found.ranks.map((rank, i) => ({
      x: 1000 * place(rank), y: 97 - 94 * found.cumulative[i],
      text: `The ${rank === 1 ? "first row has" : `${num(rank)} highest rows have`} ${DATA.texts.cumulative[i]} of the mass`,
    }));
    const line = items.map((item) => `${item.x} ${item.y}`).join("L");
    const drawing = [svg("path", { class: "band", d: `M0 97L${line}L1000 97Z` }), svg("path", { class: "line", d: `M${line}` })];
    const ranks = [];
    for (let rank = 1; rank <= found.rows; rank *= 10) ranks.push([place(rank), num(rank)]);
    const shares = [0, 0.25, 0.5, 0.75, 1].map((at) => [0.03 + 0.94 * at, `${100 * at} %`]);
    const cards = [figure("Mass of the highest rows", `effective sample ${num(Math.round(found.effective))} of ${num(found.rows)}`, drawing, items,
      { name: "rows, highest priority first (logarithmic)", ticks: ranks }, { name: "share of the mass", ticks: shares })];
    if (found.relative) cards.push(barPlot("Spectrum", "mass of a row, compared with the mean", found.relative, "power of ten of the mean", "row"));
    section("priorities", "Priorities", null, grid(cards));
  }

  function reuse() {
    if (!DATA.reuse) return;
    const counted = DATA.reuse.counted;
    const cards = [el("div", { class: "card" }, el("dl", { class: "words" }, DATA.texts.reuse.map(([name, line]) => [el("dt", {}, name), el("dd", {}, line)])))];
    if (counted && counted.histogram) cards.push(barPlot("Draws of a row", `mean ${num(counted.mean)}`, counted.histogram, "draws of a row", "row"));
    section("reuse", "Reuse", null, grid(cards));
  }

  // The browser of episodes

  let openIn = () => {};
  function decode(text) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)), view = new DataView(bytes.buffer);
    return Array.from({ length: bytes.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
  }

  function browser() {
    const found = DATA.browser;
    if (!found || !found.episodes.length) return;
    const orders = {
      "newest first": (a, b) => b.number - a.number, "highest return": (a, b) => b.return - a.return,
      "lowest return": (a, b) => a.return - b.return, "longest": (a, b) => b.length - a.length,
    };
    const list = el("ul", { "aria-label": "Episodes" }), stage = el("div", { class: "card stage" });
    const select = el("select", { "aria-label": "Order of the episodes", onchange: () => fillList() }, Object.keys(orders).map((name) => el("option", {}, name)));
    let order = [], current = null, step = 0, show = () => {};
    // Steps are counted in their episode; rows that are in no order, in the buffer.
    const firstOf = (episode) => episode.first + (found.ordered ? 0 : episode.row);
    const label = (episode) => found.ordered ? `Episode ${num(episode.number + 1)}` : `Rows ${num(episode.row)} to ${num(episode.row + episode.length - 1)}`;

    function fillList() {
      order = [...found.episodes].sort(found.ordered ? orders[select.value] : (a, b) => a.row - b.row);
      list.replaceChildren(...order.map((episode) => el("li", {}, el("button", {
        type: "button", "aria-current": episode === current ? "true" : null, onclick: () => open(episode),
      }, el("i", { class: episode.end || "reason" }), el("span", {}, label(episode)),
        el("small", {}, found.ordered ? `return ${num(episode.return)}, ${plural(episode.length, "step")}` : plural(episode.length, "row"))))));
    }

    // Scrolls the list alone: the page stays where the reader is.
    function reveal(button) {
      const inner = button.getBoundingClientRect(), outer = list.getBoundingClientRect();
      if (inner.top < outer.top) list.scrollTop -= outer.top - inner.top;
      if (inner.bottom > outer.bottom) list.scrollTop += inner.bottom - outer.bottom;
    }

    function open(episode, focus) {
      current = episode;
      order.forEach((other, i) => {
        const button = list.children[i].firstChild;
        if (other !== episode) { button.removeAttribute("aria-current"); return; }
        button.setAttribute("aria-current", "true");
        reveal(button);
        if (focus) button.focus({ preventScroll: true });
      });
      stage.replaceChildren(...drawEpisode(episode));
      show(0);
    }

    function drawEpisode(episode) {
      const series = episode.series.map(decode), count = series.length ? series[0].length : episode.length - episode.first;
      const lanes = found.series.map((name, i) => lane(name, series[i], episode, count));
      const films = episode.frames.map((strip) => film(strip, count));
      const slider = el("input", { type: "range", min: 0, max: count - 1, value: 0, "aria-label": "Step of the episode", oninput: () => show(Number(slider.value)) });
      const output = el("output", {});
      const button = (text, name, move) => el("button", { type: "button", "aria-label": name, onclick: () => show(step + move) }, text);
      const back = button("‹", "Step back", -1), forward = button("›", "Step forward", 1);
      show = (to) => {
        step = Math.max(0, Math.min(count - 1, to));
        slider.value = step;
        output.textContent = `${found.ordered ? "step" : "row"} ${num(firstOf(episode) + step)} of ${num(firstOf(episode) + count - 1)}`;
        slider.setAttribute("aria-valuetext", output.textContent);
        back.disabled = step === 0; forward.disabled = step === count - 1;
        lanes.forEach((one) => one.show(step));
        films.forEach((one) => one.show(step));
      };
      const chips = [];
      const chip = (text, kind) => chips.push(el("span", { class: "chip" }, kind ? el("i", { class: kind }) : null, text));
      if (episode.end) chip(MEANING[episode.end], episode.end);
      if (found.ordered) chip(`return ${num(episode.return)}`);
      chip(plural(episode.length, found.ordered ? "step" : "row"));
      if (found.ordered && DATA.source.num_envs) chip(`environment ${episode.env}`);
      if (episode.began === false) chip("its beginning is not stored");
      if (episode.first) chip(`the last ${num(count)} steps are in this page`);
      return [el("header", {}, el("h3", {}, label(episode))), el("div", { class: "chips" }, chips),
        el("div", { class: "steps" }, back, slider, forward, output), films.map((one) => one.node), lanes.map((one) => one.node), stepAxis(episode, count)].flat();
    }

    function stepAxis(episode, count) {
      return el("div", { class: "lane foot", "aria-hidden": "true" }, el("span", {}), el("span", {}),
        el("div", {}, el("div", { class: "ticks" }, placed(numberTicks(firstOf(episode), firstOf(episode) + count - 1, { whole: true, most: 6 }), "left")),
          el("span", { class: "name x" }, found.ordered ? "step of the episode" : "row")));
    }

    function lane(name, values, episode, count) {
      const finite = values.filter(Number.isFinite), low = Math.min(...finite, 0), high = Math.max(...finite, 0);
      const tight = /^(reward|advantage)/.test(name) ? [low, high] : [Math.min(...finite), Math.max(...finite)];
      const [bottom, span] = finite.length ? [tight[0], tight[1] - tight[0]] : [0, 0];
      const x = (t) => count > 1 ? 1000 * t / (count - 1) : 500;
      const y = (value) => span ? 94 - 88 * (value - bottom) / span : 50;
      let path = "", pen = false;
      values.forEach((value, t) => { if (Number.isFinite(value)) { path += `${pen ? "L" : "M"}${x(t).toFixed(1)} ${y(value).toFixed(1)}`; pen = true; } else pen = false; });
      if (count === 1 && path) path = `M0 ${y(values[0])}L1000 ${y(values[0])}`;
      const cursor = svg("line", { class: "cursor", y1: 0, y2: 100 });
      const drawing = svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": `${name} over the steps, from ${num(finite.length ? Math.min(...finite) : null)} to ${num(finite.length ? Math.max(...finite) : null)}` },
        span && bottom <= 0 && bottom + span >= 0 ? svg("line", { class: "zero", x1: 0, x2: 1000, y1: y(0), y2: y(0) }) : null,
        svg("path", { d: path }),
        episode.end ? svg("line", { class: `end stroke-${episode.end}`, x1: 1000, x2: 1000, y1: 0, y2: 100, "stroke-dasharray": episode.end === "running" ? "3 3" : null }) : null, cursor);
      const pick = (event) => {
        if (event.type === "pointermove" && !(event.buttons & 1)) return;
        const box = drawing.getBoundingClientRect();
        show(Math.round((count - 1) * (event.clientX - box.left) / box.width));
      };
      drawing.addEventListener("pointerdown", pick);
      drawing.addEventListener("pointermove", pick);
      const value = el("b", {}), ends = span ? [[0.06, num(bottom)], [0.94, num(bottom + span)]] : finite.length ? [[0.5, num(bottom)]] : [];
      return {
        node: el("div", { class: /^(reward|value|advantage|return)/.test(name) ? "lane main" : "lane" }, el("div", { class: "what" }, name, value),
          el("div", { class: "yticks", "aria-hidden": "true" }, placed(ends, "bottom")), drawing),
        show: (t) => { value.textContent = num(values[t]); cursor.setAttribute("x1", x(t)); cursor.setAttribute("x2", x(t)); },
      };
    }

    function film(strip, count) {
      const image = new Image();
      const cell = (i, canvas) => { canvas.width = strip.width; canvas.height = strip.height; canvas.getContext("2d").drawImage(image, -i * strip.width, 0); };
      const now = el("canvas", { class: "now", role: "img" }), caption = el("figcaption", {});
      now.style.width = `${Math.min(strip.width * Math.max(1, Math.floor(216 / strip.height)), 320)}px`;
      const cells = strip.at.map((t, i) => {
        const canvas = el("canvas", {});
        return { t, canvas, button: el("button", { type: "button", "aria-label": `Frame of step ${t}`, onclick: () => show(t) }, canvas) };
      });
      let at = 0;
      const draw = () => { if (image.complete && image.naturalWidth) cell(at, now); };
      image.addEventListener("load", () => { cells.forEach((one, i) => cell(i, one.canvas)); draw(); });
      image.src = strip.png;
      return {
        node: el("figure", { class: "film" }, caption, now, el("div", { class: "strip" }, cells.map((one) => one.button))),
        show: (t) => {
          at = 0;
          cells.forEach((one, i) => { if (one.t <= t) at = i; });
          cells.forEach((one, i) => { if (i === at) one.button.setAttribute("aria-current", "true"); else one.button.removeAttribute("aria-current"); });
          const thinned = cells.length < count ? `, one of ${cells.length} frames of ${num(count)} steps` : "";
          caption.textContent = `${strip.name}: step ${num(cells[at].t)}${thinned}`;
          now.setAttribute("aria-label", caption.textContent);
          draw();
        },
      };
    }

    const shell = el("div", { class: "browser" }, el("div", { class: "card list" }, found.ordered ? select : null, list), stage);
    // ← and → step from anywhere on the page and lead there; the other keys scroll the page until the reader is there.
    document.addEventListener("keydown", (event) => {
      if (event.defaultPrevented || event.target.tagName === "SELECT" || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
      if (!shell.contains(event.target)) {
        if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
        stage.querySelector(".steps input").focus({ preventScroll: true });
        const box = stage.getBoundingClientRect();
        if (box.top < 0 || box.top > innerHeight / 2) document.getElementById("browser").scrollIntoView();
      }
      const steps = { ArrowLeft: step - 1, ArrowRight: step + 1, PageUp: step - 10, PageDown: step + 10, Home: 0, End: Infinity }[event.key];
      const other = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (steps !== undefined) { event.preventDefault(); show(steps); }
      if (other !== undefined) {
        event.preventDefault();
        const next = order[order.indexOf(current) + other];
        if (next) open(next, list.contains(event.target));
      }
    });
    openIn = (bar) => {
      const hit = order.find((episode) => episode.began && (episode.end === "terminated" || episode.end === "truncated") && episode.return >= bar.low && episode.return <= bar.high);
      if (hit) { open(hit); document.getElementById("browser").scrollIntoView(); }
    };
    const shown = found.ordered && found.episodes.length < found.of
      ? `${num(found.episodes.length)} of ${num(found.of)} episodes are in this page: the newest, the best, the worst, the longest, and some in between. ` : "";
    const rest = found.left_out ? ` ${num(found.left_out)} more numbers of each step are not drawn.` : "";
    const keys = el("p", { class: "note" }, shown, el("kbd", {}, "←"), "\u00a0", el("kbd", {}, "→"), " step, from anywhere on this page; then ", el("kbd", {}, "↑"), "\u00a0", el("kbd", {}, "↓"),
      found.ordered ? " change the episode." : " change the rows.", rest);
    section("browser", found.ordered ? "Step through" : "Rows", null, keys, shell);
    fillList();
    open(order[0]);
  }

  // Light and dark

  function theme() {
    const root = document.documentElement, button = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
    let chosen = null;
    try { chosen = localStorage.getItem("relive-theme"); } catch { /* a page from a file may have no storage */ }
    const apply = () => {
      const dark = chosen ? chosen === "dark" : system.matches;
      root.dataset.theme = dark ? "dark" : "light";
      button.textContent = dark ? "Light" : "Dark";
    };
    button.addEventListener("click", () => {
      chosen = root.dataset.theme === "dark" ? "light" : "dark";
      try { localStorage.setItem("relive-theme", chosen); } catch { /* as above */ }
      apply();
    });
    system.addEventListener("change", apply);
    apply();
  }

  theme();
  top();
  episodes();
  browser();
  actions();
  fields();
  priorities();
  reuse();
  document.getElementById("foot").append(`Written by relive ${DATA.relive}. This page is self-contained: it loads nothing and sends nothing.`);
})();
