"use strict";
// The browser of samples: a row for each problem, a column for each run, and the answers of one problem side by side.
// Texts come from models and datasets: they enter the page through textContent alone, never as markup.
(() => {
  const BATCH = 100;  // rows that are added to the list at a time
  const SIGNS = {correct: "\u2713", wrong: "\u2717", no_answer: "\u2013", not_drawn: "\u2205", too_long: "\u2205"};
  const ENDS = {stop_id: "ended with a stop id", stop_string: "ended with a string of dataset.stop",
                length: "cut off at dataset.max_new_tokens", too_long: "prompt too long", not_drawn: "not drawn"};
  const TAKEN = {a: "accepted", i: "accepted, equal to the state", k: "kept"};
  const REFUSED = {r: "rejected", x: "rejected early", l: "not kept"};

  const node = (name, properties = {}, ...children) => {
    const made = document.createElement(name);
    Object.assign(made, properties);
    made.append(...children);
    return made;
  };
  const drawn = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const unpack = async text => {
    const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  };
  const once = make => { let made; return () => made ??= make(); };

  class Browser {
    constructor(root) {
      this.root = root;
      this.parts = [...root.querySelectorAll("script.part")].map(script => once(() => unpack(script.textContent)));
      this.open = null;
      this.chains = {};
    }

    async start() {
      const overview = await unpack(this.root.querySelector("script.overview").textContent);
      Object.assign(this, {runs: overview.runs, problems: overview.problems});
      const read = letters => Array.from({length: letters.length / 2}, (_, place) => ({
        verdict: overview.verdicts[letters.charCodeAt(2 * place) - 97], end: overview.reasons[letters.charCodeAt(2 * place + 1) - 97]}));
      this.samples = overview.samples.map(run => run.map(read));
      this.makeTools();
      this.makeList();
      this.detail = node("div", {className: "detail"});
      this.root.append(this.tools, this.list, this.detail);
      framed(this.list);
      await this.filter();
      this.root.dataset.ready = "true";
    }

    makeTools() {
      const choice = (words, options) => {
        const select = node("select", {}, ...options.map(([value, text]) => node("option", {value}, text)));
        select.addEventListener("change", () => this.filter());
        return [select, node("label", {}, words, select)];
      };
      const runs = this.runs.map((label, number) => [String(number), label]);
      const labels = [];
      const add = ([select, label]) => { labels.push(label); return select; };
      this.show = add(choice("show", [
        ["all", "all problems"], ["differ", "runs differ"],
        ...(runs.length > 1 ? [["pair", "first run right, second wrong"]] : []),
        ["right", "right"], ["wrong", "not right"], ["cut", "cut off at the limit"], ["none", "no answer"],
        ["missing", "not drawn or too long"]]));
      this.first = add(choice("run", [["any", "any run"], ["every", "every run"], ...runs]));
      this.second = add(choice("second run", runs));
      if (runs.length > 1) this.second.value = "1";
      const strata = [...new Set(this.problems.flatMap(row => [row[3], row[4]]).filter(value => value !== null && value !== ""))];
      this.stratum = add(choice("level or subject", [["", "all"], ...strata.slice(0, 200).map(value => [String(value), String(value)])]));
      this.search = node("input", {type: "search", placeholder: "id, question, answers"});
      let timer;
      this.search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => this.filter(), 150); });
      this.found = node("span", {className: "found", role: "status"});
      const step = (text, by) => {
        const button = node("button", {type: "button"}, text);
        button.addEventListener("click", () => this.step(by));
        return button;
      };
      this.tools = node("div", {className: "tools"}, ...labels, node("label", {}, "search", this.search),
                        step("\u2190 previous", -1), step("next \u2192", 1), this.found);
    }

    makeList() {
      this.rows = node("tbody");
      const heads = ["problem", ...this.runs].map(text => node("th", {scope: "col"}, text));
      this.list = node("div", {className: "list scroller", tabIndex: 0, role: "region", ariaLabel: "problems"},
                       node("table", {}, node("thead", {}, node("tr", {}, ...heads)), this.rows));
      this.list.addEventListener("scroll", () => {
        if (this.list.scrollTop + 2 * this.list.clientHeight > this.list.scrollHeight) this.more();
      }, {passive: true});
      const chosen = event => event.target.closest("tr")?.dataset.place;
      this.rows.addEventListener("click", event => { if (chosen(event)) this.select(Number(chosen(event))); });
      this.rows.addEventListener("keydown", event => { if (event.key === "Enter") this.select(Number(chosen(event))); });
    }

    // Whether a run's samples of a problem match the filter.
    matches(kind, found) {
      const right = found.filter(sample => sample.verdict === "correct").length;
      return kind === "right" ? right > 0 : kind === "wrong" ? right < found.length
        : kind === "cut" ? found.some(sample => sample.end === "length")
        : kind === "none" ? found.some(sample => sample.verdict === "no_answer")
        : found.some(sample => sample.end === "not_drawn" || sample.end === "too_long");
    }

    keeps(place) {
      const kind = this.show.value, of = run => this.samples[run][place];
      const share = found => found.filter(sample => sample.verdict === "correct").length / found.length;
      const [, , , level, subject] = this.problems[place];
      if (this.stratum.value && this.stratum.value !== String(level) && this.stratum.value !== String(subject)) return false;
      if (kind === "all") return true;
      const drawn = this.runs.map((_, run) => of(run)).filter(found => found.length);
      if (kind === "differ") return new Set(drawn.map(share)).size > 1;
      if (kind === "pair") {
        const a = of(Number(this.first.value) || 0), b = of(Number(this.second.value));
        return a.length > 0 && b.length > 0 && share(a) > share(b);
      }
      if (this.first.value === "any") return drawn.some(found => this.matches(kind, found));
      if (this.first.value === "every") return drawn.length > 0 && drawn.every(found => this.matches(kind, found));
      return of(Number(this.first.value)).length > 0 && this.matches(kind, of(Number(this.first.value)));
    }

    async filter() {
      const started = performance.now(), asked = this.asked = {};
      const kind = this.show.value, words = this.search.value.trim().toLowerCase();
      this.second.parentNode.hidden = kind !== "pair";
      this.first.parentNode.hidden = kind === "all" || kind === "differ";
      for (const option of [...this.first.options].slice(0, 2)) option.disabled = kind === "pair";
      if (kind === "pair" && Number.isNaN(Number(this.first.value))) this.first.value = "0";
      let shown = this.problems.map((_, place) => place).filter(place => this.keeps(place));
      if (words) {
        this.found.textContent = "searching \u2026";
        const texts = await this.texts();
        if (asked !== this.asked) return;  // another filter came
        shown = shown.filter(place => texts[place].includes(words));
      }
      this.shown = shown;
      this.rows.replaceChildren();
      this.list.scrollTop = 0;
      this.more();
      this.found.textContent = `${shown.length.toLocaleString("en")} of ${this.problems.length.toLocaleString("en")} problems`;
      this.root.dataset.milliseconds = String(performance.now() - started);
    }

    // What is searched, in lower case, by problem. Unpacks every part once.
    texts = once(async () => {
      const parts = await Promise.all(this.parts.map(part => part()));
      return this.problems.map(([id, part, place]) => {
        const {q, g, r} = parts[part][place];
        return [id, q ?? "", g ?? "", ...r.flat().flatMap(sample => [sample.t, sample.a ?? ""])].join("\n").toLowerCase();
      });
    });

    more() {
      const start = this.rows.rows.length;
      this.rows.append(...this.shown.slice(start, start + BATCH).map(place => this.row(place)));
    }

    row(place) {
      const made = node("tr", {tabIndex: 0}, node("th", {scope: "row"}, shorten(this.problems[place][0], 120)),
                        ...this.runs.map((_, run) => this.cell(this.samples[run][place])));
      made.dataset.place = place;
      made.setAttribute("aria-selected", String(place === this.open));
      return made;
    }

    cell(found) {
      const right = found.filter(sample => sample.verdict === "correct").length;
      const cut = found.some(sample => sample.end === "length") ? " \u2702" : "";
      const text = found.length === 1 ? SIGNS[found[0].verdict] ?? "!" : found.length ? `${right}/${found.length}` : "";
      const title = [...new Set(found.map(sample => `${sample.verdict}; ${ENDS[sample.end]}`))].join("\n");
      const kind = right === found.length ? found.length ? "good" : "" : right ? "" : "bad";  // no colour for some chains right
      return node("td", {className: kind, title}, text + cut);
    }

    step(by) {
      const at = this.shown.indexOf(this.open), next = this.shown[at < 0 ? 0 : at + by];
      if (next === undefined) return;
      while (this.rows.rows.length <= this.shown.indexOf(next)) this.more();
      this.select(next);
      const row = this.rows.rows[this.shown.indexOf(next)];
      this.list.scrollTop = row.offsetTop - this.list.clientHeight / 2;  // without moving the page
    }

    async select(place) {
      this.open = place;
      for (const row of this.rows.rows) row.setAttribute("aria-selected", String(Number(row.dataset.place) === place));
      const [id, part, at, level, subject] = this.problems[place];
      const content = (await this.parts[part]())[at];
      if (this.open !== place) return;
      const facts = [level !== null ? `level ${level}` : "", subject ?? "", `gold answer: ${content.g}`].filter(Boolean);
      this.detail.replaceChildren(node("h3", {}, shorten(id, 400)), node("p", {className: "note"}, facts.join(" \u00b7 ")));
      if (content.q !== null) this.detail.append(node("pre", {className: "question"}, content.q));
      for (const [prompt, runs] of content.p) {
        const of = runs.length < this.runs.length ? ` of ${runs.map(run => this.runs[run]).join(", ")}` : "";
        this.detail.append(node("details", {}, node("summary", {}, `prompt${of}`), node("pre", {}, prompt)));
      }
      const answers = node("div", {className: "answers scroller", tabIndex: 0, role: "region", ariaLabel: "answers"});
      content.r.forEach((samples, run) => { if (samples.length) answers.append(this.answer(place, run, samples)); });
      this.detail.append(answers);
      framed(answers).classList.add("whole");
    }

    answer(place, run, samples) {
      const body = node("div"), buttons = node("div", {className: "chains"});
      const show = number => {
        this.chains[run] = number;
        body.replaceChildren(...facts(samples[number], this.samples[run][place][number]));
        for (const [at, button] of [...buttons.children].entries()) button.setAttribute("aria-pressed", String(at === number));
      };
      if (samples.length > 1) samples.forEach((sample, number) => {
        const button = node("button", {type: "button", title: `chain ${sample.c}`},
                            `${sample.c} ${SIGNS[this.samples[run][place][number].verdict] ?? "!"}`);
        button.addEventListener("click", () => show(number));
        buttons.append(button);
      });
      show(Math.min(this.chains[run] ?? 0, samples.length - 1));
      return node("article", {className: "answer"}, node("h4", {}, this.runs[run]), buttons, body);
    }
  }

  const shorten = (text, most) => text.length > most ? `${text.slice(0, most - 30)} \u2026 (${text.length.toLocaleString("en")} characters)` : text;

  // Verdict, end, numbers, chart and text of a sample.
  const facts = (sample, {verdict, end}) => {
    const right = verdict === "correct";
    const rule = [sample.u, sample.y].filter(Boolean).join(": ");
    const lines = [node("p", {}, node("span", {className: right ? "good" : "bad"}, `${SIGNS[verdict] ?? "!"} ${verdict.replaceAll("_", " ")}`),
                        rule ? ` (${shorten(rule, 300)})` : "")];
    const add = text => lines.push(node("p", {}, text));
    if (sample.a !== null) add(`answer: ${shorten(sample.a, 500)}`);
    add(`${ENDS[end]}; ${sample.n.toLocaleString("en")} tokens; log p ${sample.l.toFixed(2)}`);
    const [proposals, accepted, moved] = sample.m;
    if (proposals) add(`${accepted} of ${proposals} proposals accepted, ${moved} moved`);
    if (sample.x.length) lines.push(chart(sample.x));
    lines.push(node("pre", {dir: "auto"}, sample.t));
    return lines;
  };

  // log p after each step: a line for each rung, the blocks shaded in turn, a filled point where a proposal was accepted.
  const chart = series => {
    const width = 320, height = 90, left = 46, top = 6, bottom = 74;
    const values = series.map(({p}) => { let sum = 0; return p.map(step => (sum += step) / 1000); });
    const low = values.reduce((least, line) => line.reduce((a, b) => Math.min(a, b), least), Infinity);
    const high = values.reduce((most, line) => line.reduce((a, b) => Math.max(a, b), most), -Infinity);
    const longest = Math.max(...values.map(line => line.length)), span = high - low || 1;
    const x = step => left + (width - left - 6) * (longest > 1 ? step / (longest - 1) : 0.5);
    const y = value => bottom - (bottom - top) * (value - low) / span;
    const svg = drawn("svg", {viewBox: `0 0 ${width} ${height}`, role: "img",
                              "aria-label": `log p after each of ${longest} steps, from ${low.toFixed(2)} to ${high.toFixed(2)}`});
    let start = 0;
    series[0].b.forEach(([, steps], number) => {
      const from = x(start - 0.5), to = x(start + steps - 0.5);
      if (number % 2) svg.append(drawn("rect", {class: "block", x: from, y: top, width: Math.max(0, to - from), height: bottom - top}));
      start += steps;
    });
    [...values.entries()].reverse().forEach(([number, line]) => svg.append(drawn("polyline", {
      class: number ? "line other" : "line", points: line.map((value, step) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ")})));
    if (longest <= 400) values[0].forEach((value, step) => {
      const letter = series[0].d[step], taken = letter in TAKEN;
      const point = drawn("circle", {class: taken ? "taken" : "refused", cx: x(step), cy: y(value), r: letter === "a" || letter === "k" ? 2.4 : 1.4});
      point.append(drawn("title", {}, `step ${step + 1}: log p ${value.toFixed(3)}; ${TAKEN[letter] ?? REFUSED[letter] ?? "?"}`));
      svg.append(point);
    });
    const label = (text, at, anchor, height) => svg.append(drawn("text", {x: at, y: height, "text-anchor": anchor}, text));
    label(high.toFixed(1), left - 4, "end", top + 8);
    label(low.toFixed(1), left - 4, "end", bottom);
    label("log p", left - 4, "end", (top + bottom) / 2 + 4);
    const blocks = series[0].b.length;
    label(`${longest} steps` + (blocks > 1 ? ` in ${blocks} blocks` : "") + (series.length > 1 ? `, ${series.length} rungs` : ""),
          (left + width) / 2, "middle", height - 4);
    return svg;
  };

  const start = async () => {
    for (const root of document.querySelectorAll(".samples")) {
      const browser = root.browser = new Browser(root);
      try {
        await browser.start();
      } catch (error) {
        root.append(node("p", {className: "bad"}, `The samples cannot be read: ${error}`));
      }
    }
  };
  window.addEventListener("load", () => setTimeout(start));
})();
