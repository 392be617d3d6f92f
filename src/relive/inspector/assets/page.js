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
  const share = (part, whole) => {
    if (!whole) return "0 %";
    const percent = 100 * part / whole;
    if (percent > 0 && percent < 0.1) return "<0.1 %";
    if (percent < 100 && percent > 99.9) return ">99.9 %";
    return `${percent >= 1 && percent <= 99 ? percent.toFixed(0) : Number(percent.toFixed(1))} %`;
  };
  const plural = (count, word) => `${num(count)} ${word}${count === 1 ? "" : "s"}`;

  // Plots: a drawing that stretches, a line under it that says what the pointer or the arrow keys are at.

  function figure(title, aside, drawing, items, ticks, { pick = null, even = false } = {}) {
    const readout = el("p", { class: "readout", "aria-live": "polite" }, aside);
    const cursor = svg("line", { class: "cursor", y1: 0, y2: 100, visibility: "hidden" });
    const plot = svg("svg", {
      class: "plot", viewBox: "0 0 1000 100", preserveAspectRatio: "none", tabindex: 0, role: "img",
      "aria-label": `${title}. ${aside}. Use the arrow keys to read values.`,
    }, drawing, cursor);
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
    return el("figure", { class: "card" },
      el("h3", {}, title), readout, plot, el("div", { class: even ? "ticks even" : "ticks" }, ticks.map((tick) => el("span", {}, tick))));
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

  function barPlot(title, aside, histogram, of, pick) {
    const items = bars(histogram, of);
    const edges = histogram.values || histogram.edges;
    const even = Boolean(histogram.values) && edges.length <= 10;
    const ticks = even ? edges : [edges[0], edges[edges.length >> 1], edges[edges.length - 1]];
    return figure(title, aside, items.map((item) => item.mark), items, ticks.map(num), { pick, even });
  }

  function curvePlot(title, aside, curve) {
    const known = curve.mean.map((mean, i) => ({ mean, low: curve.min[i], high: curve.max[i], at: curve.at[i] })).filter((x) => x.mean !== null && x.low !== null);
    const low = Math.min(...known.map((x) => x.low)), high = Math.max(...known.map((x) => x.high)), span = high - low || 1;
    const y = (value) => 97 - 94 * (value - low) / span, last = known.length - 1;
    const x = (i) => last ? 1000 * i / last : 500;
    const over = known.map((p, i) => `${x(i)} ${y(p.high)}`), under = known.map((p, i) => `${x(i)} ${y(p.low)}`).reverse();
    const items = known.map((p, i) => {
      const from = i ? known[i - 1].at + 1 : 1;
      const which = from === p.at ? `Episode ${num(p.at)}` : `Episodes ${num(from)} to ${num(p.at)}`;
      return { x: x(i), text: `${which}: ${from === p.at ? num(p.mean) : `mean ${num(p.mean)}, from ${num(p.low)} to ${num(p.high)}`}` };
    });
    const drawing = [svg("path", { class: "band", d: `M${over.join("L")}L${under.join("L")}Z` }),
      svg("path", { class: "line", d: `M${known.map((p, i) => `${x(i)} ${y(p.mean)}`).join("L")}` })];
    return figure(title, aside, drawing, items, ["oldest", `${num(low)} to ${num(high)}`, "newest"]);
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
    main.append(el("h1", {}, source.kind), el("p", { class: "lead" }, source.path || "what an agent learns from, as it is stored"));
    const figures = [];
    const add = (name, value, small) => figures.push(el("div", {}, el("dt", {}, name), el("dd", {}, value, small ? el("small", {}, small) : null)));
    add("rows", num(source.rows), source.capacity ? `of ${num(source.capacity)}` : source.num_steps ? `${num(source.num_stored)} of ${num(source.num_steps)} steps` : null);
    if (episodes.count !== undefined) add("episodes", num(episodes.count), `${num(episodes.whole)} whole`);
    if (episodes.returns) add("mean return", num(episodes.returns.mean), `${num(episodes.returns.min)} to ${num(episodes.returns.max)}`);
    if (episodes.lengths) add("mean length", num(episodes.lengths.mean), `${num(episodes.lengths.min)} to ${num(episodes.lengths.max)}`);
    if (DATA.fit !== null) add("explained variance", num(DATA.fit), "of returns, by values");
    if (DATA.priorities && DATA.priorities.effective !== null) add("effective sample", num(Math.round(DATA.priorities.effective)), share(DATA.priorities.effective, DATA.priorities.rows) + " of rows");
    if (DATA.reward) add("reward is 0", share(DATA.reward.zero, DATA.reward.rows), "of rows");
    const memory = DATA.facts.find(([name]) => name === "memory");
    if (memory) add("memory", memory[1], null);
    main.append(el("dl", { class: "figures" }, figures));
    main.append(el("details", { class: "more" }, el("summary", {}, "All facts"),
      el("dl", {}, DATA.facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]))));
    main.append(DATA.warnings.length
      ? el("ul", { class: "warnings", "aria-label": "Warnings" }, DATA.warnings.map((line) => el("li", {}, line)))
      : el("p", { class: "fine" }, "Nothing looks odd."));
  }

  const grid = (cards) => el("div", { class: cards.length % 3 === 1 || cards.length === 2 ? "grid two" : "grid" }, cards);

  function endsCard(title, counts, reasons) {
    const total = ENDS.reduce((sum, name) => sum + (counts[name] || 0), 0);
    let x = 0;
    const bar = svg("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": `${title} by kind` },
      ENDS.filter((name) => counts[name]).map((name) => {
        const width = 1000 * counts[name] / total;
        const piece = svg("rect", { class: name, x, y: 0, width: Math.max(width - 2, 1), height: 10, stroke: "none" });
        x += width;
        return piece;
      }));
    const line = (kind, what, count) => el("li", {}, el("i", { class: kind }), el("span", { class: "what" }, what), el("b", {}, `${num(count)} · ${share(count, total)}`));
    return el("figure", { class: "card" }, el("h3", {}, title), el("p", { class: "readout" }, plural(total, "episode")),
      el("div", { class: "ends" }, bar),
      el("ul", { class: "key" }, ENDS.filter((name) => counts[name]).map((name) => line(name, MEANING[name], counts[name])),
        Object.entries(reasons || {}).map(([name, count]) => line("reason", name, count))));
  }

  function episodes() {
    const found = DATA.episodes, stats = found && found.stats;
    const counted = stats && stats.window;
    // Where the statistics have seen nothing but what is stored, they add the reasons only.
    const apart = counted && (stats.episodes !== found.whole || Object.keys(stats.metrics).length);
    if (found && found.count) {
      const cards = [];
      if (found.returns) {
        cards.push(barPlot("Returns", spread(found.returns), found.returns.histogram, "episode", (item) => openIn(item)));
        cards.push(barPlot("Lengths", spread(found.lengths), found.lengths.histogram, "episode"));
        if (found.curve && found.curve.at.length > 1) cards.push(curvePlot("Return by episode", spread(found.returns), found.curve));
      }
      cards.push(endsCard("Ends", found.ends, counted && !apart ? stats.reasons : null));
      section("episodes", "Episodes", found.whole === found.count ? null : found.whole
        ? `${num(found.whole)} of ${num(found.count)} are stored from their first step to their end; returns and lengths are of these.`
        : "None is stored from its first step to its end, so that no return is known.",
        grid(cards));
    }
    if (apart) {
      const cards = stats.curve && stats.curve.at.length > 1 ? [curvePlot("Return by episode", spread(stats.returns), stats.curve)] : [];
      cards.push(barPlot("Returns", spread(stats.returns), stats.returns.histogram, "episode"),
        barPlot("Lengths", spread(stats.lengths), stats.lengths.histogram, "episode"),
        endsCard("Ends", { terminated: stats.terminated, truncated: stats.truncated }, stats.reasons));
      for (const [name, moments] of Object.entries(stats.metrics))
        if (moments && moments.histogram) cards.push(barPlot(name, spread(moments), moments.histogram, "episode"));
      section("statistics", "Statistics", `What was counted while it ran: ${plural(stats.episodes, "episode")} in ${plural(stats.steps, "step")}, stored or not.${stats.window < stats.episodes ? ` Shown are the last ${num(stats.window)}.` : ""}`, grid(cards));
    }
  }

  function actions() {
    const cards = [];
    for (const field of DATA.fields) {
      const head = field.name.split(".")[0];
      if (head !== "action") continue;
      for (const part of (field.dimensions.length ? field.dimensions : [field]).slice(0, 12))
        if (part.histogram) cards.push(barPlot(part.name, `${num(part.min)} to ${num(part.max)}`, part.histogram, "row"));
    }
    if (DATA.reward && DATA.reward.histogram)
      cards.unshift(barPlot("reward", `0 in ${share(DATA.reward.zero, DATA.reward.rows)} of rows`, DATA.reward.histogram, "row"));
    if (cards.length) section("actions", DATA.reward ? "Rewards and actions" : "Actions", null, grid(cards));
  }

  function spark(histogram, name) {
    if (!histogram) return null;
    return svg("svg", { class: "spark", viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": `Histogram of ${name}` },
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
        ["field", "form", "min", "mean", "max", "std", "values", ""].map((name, i) => el("th", { scope: "col", class: i === 1 || i === 6 ? "left" : null }, name)))), body)));
  }

  function priorities() {
    const found = DATA.priorities;
    if (!found || found.effective === null) return;
    const most = Math.log(found.rows) || 1;
    const items = found.ranks.map((rank, i) => ({
      x: 1000 * Math.log(rank) / most, y: 97 - 94 * found.cumulative[i],
      text: `The ${rank === 1 ? "first row has" : `${num(rank)} highest rows have`} ${share(found.cumulative[i], 1)} of the mass`,
    }));
    const line = items.map((item) => `${item.x} ${item.y}`).join("L");
    const drawing = [svg("path", { class: "band", d: `M0 97L${line}L1000 97Z` }), svg("path", { class: "line", d: `M${line}` })];
    const cards = [figure("Mass of the highest rows", `effective sample ${num(Math.round(found.effective))} of ${num(found.rows)}`, drawing, items, ["1 row", "logarithmic", `${num(found.rows)} rows`])];
    if (found.relative) cards.push(barPlot("Spectrum", "powers of ten of the mean", found.relative, "row"));
    section("priorities", "Priorities", null, grid(cards));
  }

  function reuse() {
    if (!DATA.reuse) return;
    const counted = DATA.reuse.counted;
    const cards = [el("div", { class: "card" }, el("dl", { class: "words" }, DATA.reuse_told.map(([name, line]) => [el("dt", {}, name), el("dd", {}, line)])))];
    if (counted && counted.histogram) cards.push(barPlot("Draws of a row", `mean ${num(counted.mean)}`, counted.histogram, "row"));
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
        slider.setAttribute("aria-valuetext", `step ${episode.first + step}`);
        output.textContent = `step ${num(episode.first + step)} of ${num(episode.length - 1)}`;
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
        el("div", { class: "steps" }, back, slider, forward, output), films.map((one) => one.node), lanes.map((one) => one.node)].flat();
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
      const value = el("b", {});
      return {
        node: el("div", { class: /^(reward|value|advantage|return)/.test(name) ? "lane main" : "lane" }, el("div", { class: "what" }, name, value), drawing),
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
    shell.addEventListener("keydown", (event) => {
      if (event.target.tagName === "SELECT" || event.altKey || event.ctrlKey || event.metaKey) return;
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
    const keys = el("p", { class: "note" }, shown, el("kbd", {}, "←"), " ", el("kbd", {}, "→"), " step, ", el("kbd", {}, "↑"), " ", el("kbd", {}, "↓"),
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
