"use strict";
// The page of `asyncflow view`, and of report.html, which has the same data inside. What runs say is only ever
// set as text (textContent), never as HTML.

// What is shown, in the order in which one asks: does it learn, is it stable, is it fast.
// figures: names in metrics.jsonl; a name that ends in / stands for every figure below it.
const SECTIONS = [
  { id: "learning", title: "Does it learn?", panels: [
    { title: "Reward", unit: "mean per response", figures: ["reward_mean"],
      says: "Should rise and then level off. Flat from the start: all responses of a group get the same reward, or the "
        + "learning rate is too small." },
    { title: "Cross entropy", unit: "nats per trained token", figures: ["cross_entropy"],
      says: "Of supervised fine-tuning: falls fast, then slowly. Near 0 on data that it has seen several times: it "
        + "memorizes." },
    { title: "Held-out accuracy", unit: "share, with its 95 % interval", evaluation: ["accuracy"],
      says: "On prompts that are not trained on: the figure to trust. Two runs differ if their bands do not overlap." },
    { title: "Training accuracy", unit: "share of responses", figures: ["accuracy"],
      says: "Near 0 or 1 the groups have no differences left to learn from. Rising while held-out accuracy falls: it "
        + "memorizes." },
    { title: "Response length", unit: "tokens, mean", figures: ["response_tokens_mean"],
      says: "May grow as the model learns to reason. A jump together with falling reward is a collapse or a loophole." },
    { title: "Truncated responses", unit: "share", figures: ["truncated_fraction"],
      says: "Should stay below about 0.1; otherwise raise rollout.max_response_tokens, or it learns to be cut." },
    { title: "Spread of rewards", unit: "standard deviation", figures: ["reward_std"],
      says: "At 0 there is nothing to learn: every response is as good as every other one." },
    { title: "Held-out pass@k", unit: "share", evaluation: ["pass_at_"],
      says: "The chance that one of k responses is right. If it falls while accuracy rises, the model loses variety." },
  ] },
  { id: "stability", title: "Is it stable?", panels: [
    { title: "KL to the reference", unit: "nats per token", figures: ["kl"],
      says: "0 at first, then grows slowly. Above 1 the policy is far from where it started: look at samples." },
    { title: "Entropy", unit: "nats per token", figures: ["entropy"],
      says: "Falls slowly as the policy gets certain. Near 0 it has collapsed and explores no more; rising: it comes apart." },
    { title: "Gap between engines", unit: "nats, |generator - trainer|",
      figures: ["rollout_log_prob_diff_mean", "rollout_log_prob_diff_max"],
      says: "Of the same weights in both engines: rounding only. A mean above about 0.05 in bfloat16, or 0.001 in float32, "
        + "means that they disagree." },
    { title: "Staleness", unit: "versions", figures: ["staleness_mean", "staleness_max", "staleness_bound"],
      says: "How many versions older than the step a response's oldest token is. Never above the bound." },
    { title: "Staleness, newest step", unit: "responses", histogram: "staleness", x: "versions",
      says: "Most responses at 0 or 1; all of them at the bound: the trainer is slower than generation." },
    { title: "Effective sample size", unit: "share, 1 = on-policy", figures: ["effective_sample_size"],
      says: "How much of the batch still counts after the correction for old weights. Usually above 0.9; if not, lower "
        + "max_staleness." },
    { title: "Clipped tokens", unit: "share", figures: ["clip_fraction"],
      says: "Usually below 0.2. More: the updates are too large for the data's age." },
    { title: "Gradient norm", unit: "before clipping", figures: ["grad_norm"],
      says: "Steady. Spikes that grow from step to step come before a collapse." },
    { title: "Loss", unit: "", figures: ["loss"], says: "Not a measure of progress in RL: it should only stay bounded." },
    { title: "Rewards, newest step", unit: "responses", histogram: "reward", x: "reward", says: "A mix of good and bad ones teaches most." },
    { title: "Lengths, newest step", unit: "responses", histogram: "response_tokens", x: "tokens",
      says: "A peak at the right end are truncated responses." },
  ] },
  { id: "speed", title: "Is it fast?", panels: [
    { title: "Throughput", unit: "trained tokens/s", figures: ["train_tokens_per_s"],
      says: "The first steps are slow (compilation, caches); after that it should be even." },
    { title: "Time of a step", unit: "s", figures: ["step_time_s"], plan: "step_s", says: "Compare it with the plan, if there is one." },
    { title: "Idle", unit: "share of the time, by role", figures: ["idle_fraction/"],
      says: "The role that is idle least is the bottleneck. Give it devices of the one that is idle most." },
    { title: "Queue depth", unit: "rows ready, by task", depths: true,
      says: "How many rows wait for a task's workers. Few is good; a task whose rows grow is slower than those before it." },
    { title: "Wait for the first rows", unit: "s", figures: ["first_micro_batch_wait_s"],
      says: "How long the trainer waits for data. Large: generation is the bottleneck." },
    { title: "Stalls", unit: "s", figures: ["sync_exposed_s", "checkpoint_stall_s"],
      says: "How long publishing weights and saving block the trainer. Should be a small part of a step." },
  ] },
];
const COLOURS = ["#2f6fb3", "#d9822b", "#2e9e6b", "#b8479d", "#7a5cd0", "#c23b3b", "#128a9c", "#8a6d1d", "#e58fc4", "#7fae2f",
  "#4ab8f0", "#8c4a2f"];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const CARDS = [["reward_mean", "reward"], ["accuracy", "accuracy"], ["kl", "KL"], ["entropy", "entropy"],
  ["response_tokens_mean", "tokens per response"], ["staleness_mean", "staleness"], ["train_tokens_per_s", "tokens/s"],
  ["step_time_s", "s per step"], ["perplexity", "perplexity"]];
const WHOLE_STEPS = [1, 10, 100, 1000, 10000, 100000].flatMap((size) => [size, 2 * size, 5 * size]);
const PER_PAGE = 20, POLL_MS = 1500, FINISHED_POLL_MS = 10000;

// Text

/** Characters that command a terminal or turn the direction of text are shown as escapes. */
function shown(text) {
  // eslint-disable-next-line no-control-regex
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029]/g,
    (char) => "\\u" + char.charCodeAt(0).toString(16).padStart(4, "0"));
}

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined) continue;
    node.append(child instanceof Node ? child : document.createTextNode(shown(child)));
  }
  return node;
}

function fill(node, ...children) { node.replaceChildren(...children.flat().filter((child) => child)); }

/** Fill a node unless it shows the same already: what somebody selects there, to copy it, stays selected. */
function refill(node, ...children) {
  const fresh = el("div");
  fill(fresh, ...children);
  if (fresh.innerHTML !== node.innerHTML) node.replaceChildren(...fresh.childNodes);
}

function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  const size = Math.abs(value);
  if (size >= 10000) return Math.round(value).toLocaleString("en");
  if (size !== 0 && size < 0.0001) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "-";
  const whole = Math.max(0, Math.round(seconds)), hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  if (hours) return hours + " h " + minutes + " min";
  return minutes ? minutes + " min " + (whole % 60) + " s" : whole + " s";
}

function swatch(colour, dash = 0) {
  const mark = el("i", dash ? { class: "dash" + dash } : null);
  mark.style.color = colour;
  return mark;
}

function table(heads, rows) {
  return el("div", { class: "scroll" }, el("table", null,
    el("thead", null, el("tr", null, heads.map((head) => el("th", null, head)))),
    el("tbody", null, rows.map((row) => el("tr", null, row.map((cell) => el("td", null, cell)))))));
}

// Where the data comes from: this page's server, or this page.

function liveSource() {
  async function ask(path, query) {
    const response = await fetch("api/" + path + "?" + new URLSearchParams(query || {}));
    if (!response.ok) throw new Error(response.status + " " + response.statusText);
    return response.json();
  }
  return {
    frozen: false,
    state: (have) => ask("state", { have }),
    samples: (run, query) => ask("samples", { run, ...query }),
    logs: async (run) => (await ask("log", { run })).logs,
    log: (run, log, from) => ask("log", from === null ? { run, log } : { run, log, from }),
    stacks: (run) => ask("stacks", { run }),
    account: (run) => ask("account", { run }),
    timeline: (run, stretch) => ask("timeline", { run, ...stretch }),
    trace: (run, row) => ask("trace", { run, row }),
    settings: () => ask("settings"),
    control: (what, run) => fetch(`api/${what}?run=${run}`, { method: "POST", headers: { "X-AsyncFlow": "control" } }),
  };
}

/** Return [first, last] of a text such as `3` or `3-10`; null: all steps. Throws where it is none of these. */
function stepsIn(text) {
  if (!text) return null;
  const found = /^(\d{1,9})(?:-(\d{1,9}))?$/.exec(text.replace(/\s/g, ""));
  if (!found) throw new Error(`steps: "${text}" is no step; give one, such as 3, or a range, such as 3-10`);
  const first = Number(found[1]), last = Number(found[2] || found[1]);
  if (last < first) throw new Error(`steps: ${first}-${last} goes backwards; give ${last}-${first}`);
  return [first, last];
}

/** Return the texts in a value of JSON, without keys and roles. */
function textsIn(value) {
  if (typeof value === "string") return [value];
  if (Array.isArray(value)) return value.flatMap(textsIn);
  return Object.entries(value || {}).flatMap(([name, each]) => name === "role" ? [] : textsIn(each));
}

function frozenSource(data) {
  return {
    frozen: true,
    state: async () => data.state,
    samples: async (run, query) => {
      const wanted = query.search.toLowerCase(), steps = stepsIn(query.step);
      const rows = data.samples.rows.filter((row) => (!wanted || [row.prompt, row.response, row.ground_truth, row.conversations]
        .flatMap(textsIn).some((text) => text.toLowerCase().includes(wanted)))
        && (!steps || (row.step >= steps[0] && row.step <= steps[1])));
      const sign = query.order === "best" ? -1 : 1;
      if (query.order === "newest") rows.sort((a, b) => b.step - a.step || a.group - b.group || a.index - b.index);
      else rows.sort((a, b) => (a.reward === null) - (b.reward === null) || sign * (a.reward - b.reward));
      return { steps: data.samples.steps, total: rows.length, rows: rows.slice(query.skip, query.skip + query.number) };
    },
    logs: async () => Object.keys(data.logs),
    log: async (run, log) => ({ text: data.logs[log], position: 0, follows: false }),
    stacks: async () => data.stacks,
    account: async () => data.account,
    timeline: async () => data.timeline,
    settings: async () => data.settings,
  };
}

// The runs

/** Replace what points have from a place on. */
function extend(xs, columns, from, newXs, newColumns) {
  xs.length = Math.min(xs.length, from);
  xs.push(...newXs);
  for (const [name, values] of Object.entries(newColumns)) {
    const column = columns[name] = columns[name] || [];
    while (column.length < from) column.push(null);
    column.length = from;
    column.push(...values);
  }
}

class Run {
  constructor() {
    this.generation = -1; this.stride = 0; this.steps = []; this.values = {}; this.evaluations = []; this.now = {};
    this.depths = { stride: 0, times: [], values: {} };
  }

  have() {
    return [this.generation, this.stride, this.steps.length, this.evaluations.length, this.depths.stride, this.depths.times.length].join(".");
  }

  take(state) {
    const news = state.curves;
    if (news.generation !== this.generation || news.stride !== this.stride) { this.steps = []; this.values = {}; }
    this.generation = news.generation; this.stride = news.stride;
    extend(this.steps, this.values, news.from, news.steps, news.values);
    const queue = state.queue_depths;
    if (queue.stride !== this.depths.stride) this.depths = { times: [], values: {} };
    this.depths.stride = queue.stride; this.depths.since = queue.since;
    extend(this.depths.times, this.depths.values, queue.from, queue.times, queue.values);
    if (state.evaluations !== null) this.evaluations = state.evaluations;
    this.now = state;
  }
}

/** Weighted mean of a value and those before it; nulls stay. */
function smooth(values, weight) {
  let sum = 0, weights = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    weights = weight * weights + (1 - weight);
    return sum / weights;
  });
}

/** Room for a curve; one that does not move gets a scale in which noise is not drawn at full height. */
function roomFor(plot, low, high) {
  if (low === null || high === null) return [0, 1];
  if (high - low < 1e-9 * Math.max(1, Math.abs(high))) return low === 0 ? [-0.05, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  return uPlot.rangeNum(low, high, 0.08, true);
}

// A panel with curves

const page = { runs: [], panels: [], smoothing: 0, current: 0, source: null, zoom: null, stacks: new Map(), timeline: null };

const dark = matchMedia("(prefers-color-scheme: dark)");  // a plot keeps the colours with which it was made

class Panel {
  constructor(spec) {
    this.spec = spec;
    this.hover = el("div", { class: "hover" });
    this.box = el("div", { class: "plot" });
    this.says = spec.says ? el("p", null, spec.says) : null;
    this.node = el("section", { class: "panel" },
      el("h3", null, spec.title + " ", el("span", { class: "unit" }, spec.unit || "")),
      this.box, this.hover, this.says);
    this.plot = null; this.signature = "";
    new ResizeObserver(() => {
      if (this.plot && this.box.clientWidth) this.plot.setSize({ width: this.box.clientWidth, height: 190 });
    }).observe(this.box);
  }

  /** Return the curves: {label, colour, dash, xs, ys, faint, band}. */
  curves() {
    const found = [], several = page.runs.length > 1;
    page.runs.forEach((run, place) => {
      const wanted = (names, known) => names.flatMap((name) => name.endsWith("/") || name.endsWith("_")
        ? known.filter((one) => one.startsWith(name) && !/_(low|high)$/.test(one)).sort()
        : known.includes(name) ? [name] : []);
      const add = (name, xs, ys, number, more) => {
        if (!ys.some((value) => value !== null && value !== undefined)) return;
        more.few = ys.filter((value) => value !== null && value !== undefined).length < 3;
        const label = (several ? run.now.name + " " : "") + (several && number === 0 && this.single ? "" : name);
        const colour = COLOURS[(several ? place : number) % COLOURS.length], dash = several ? number % DASHES.length : 0;
        found.push({ label: label.trim(), colour, dash, xs, ys, ...more });
      };
      if (this.spec.histogram) {
        if (place !== page.current) return;
        const bars = Object.entries((run.now.histograms || {})[this.spec.histogram] || {})
          .map(([value, count]) => [Number(value), count]).sort((a, b) => a[0] - b[0]);
        if (bars.length) add(run.now.name, bars.map((bar) => bar[0]), bars.map((bar) => bar[1]), 0, { bars: true });
        return;
      }
      if (this.spec.depths) {
        const { times, values } = run.depths, tasks = Object.keys(values).sort();
        tasks.forEach((task, number) => add(task, times, values[task], number, {}));
        return;
      }
      const figures = wanted(this.spec.figures || [], Object.keys(run.values));
      this.single = figures.length < 2;
      figures.forEach((name, number) => {
        const raw = run.values[name], label = this.spec.figures.some((one) => one.endsWith("/")) ? name.split("/").pop() : name;
        if (page.smoothing) add(label, run.steps, raw, number, { faint: true });
        add(label, run.steps, page.smoothing ? smooth(raw, page.smoothing) : raw, number, {});
      });
      const rows = run.evaluations, keys = [...new Set(rows.flatMap((row) => Object.keys(row)))];
      // Of several held-out sets each figure is there as NAME/figure, too; those without a name are the first one's.
      const sets = [...new Set(keys.filter((key) => key.includes("/")).map((key) => key.slice(0, key.lastIndexOf("/") + 1)))];
      const asked = (this.spec.evaluation || []).flatMap((name) => sets.length ? sets.map((set) => set + name) : [name]);
      const named = wanted(asked, keys);
      if (this.spec.evaluation) this.single = named.length < 2;
      named.forEach((name, number) => {
        const column = (key) => rows.map((row) => row[key] === undefined ? null : row[key]);
        add(name, rows.map((row) => row.step), column(name), number,
          { points: true, low: keys.includes(name + "_low") ? column(name + "_low") : null, high: column(name + "_high") });
      });
    });
    return found;
  }

  update() {
    const curves = this.curves();
    this.node.hidden = curves.length === 0;
    if (this.spec.depths) this.says.textContent = this.spec.says + this.watched();
    if (!curves.length || !this.box.clientWidth) return;
    const series = [{}], tables = [], bands = [];
    for (const curve of curves) {
      const alpha = curve.faint ? "55" : "";
      // A copy: the run's own array grows, and what is drawn would seem to be a zoom into it.
      const columns = [curve.xs.slice(), curve.ys];
      series.push({ label: curve.label, stroke: curve.colour + alpha, width: curve.faint ? 1 : 1.7, dash: DASHES[curve.dash],
        fill: curve.bars ? curve.colour + "88" : undefined, spanGaps: true,
        paths: curve.bars ? uPlot.paths.bars({ size: [0.7, 60] }) : undefined,
        points: { show: curve.bars ? false : curve.points || curve.few ? true : undefined, size: 5 }, curve });
      if (curve.low) {
        columns.push(curve.high, curve.low);
        for (let i = 0; i < 2; i++) series.push({ stroke: "transparent", width: 0, points: { show: false }, hidden: true });
        bands.push({ series: [series.length - 2, series.length - 1], fill: curve.colour + "30" });
      }
      tables.push(columns);
    }
    const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
    const signature = JSON.stringify([dark.matches, curves.map((curve) => [curve.label, curve.faint, curve.low !== null, curve.colour,
      curve.few, curve.bars && curve.xs.every(Number.isInteger)])]);
    if (this.plot && signature === this.signature) {
      const xs = this.plot.data[0], scale = this.plot.scales.x;
      const zoomed = xs.length > 1 && (scale.min > xs[0] || scale.max < xs[xs.length - 1]);
      this.plot.setData(data, !zoomed);
      if (zoomed) this.plot.redraw();
    } else {
      if (this.plot) this.plot.destroy();
      this.signature = signature;
      const whole = curves[0].bars && curves[0].xs.every(Number.isInteger);
      this.plot = new uPlot(this.options(series, bands, curves[0].bars, whole), data, this.box);
    }
    this.tell(null);
  }

  /** Say since when the queue is watched. */
  watched() {
    const since = Math.min(...page.runs.map((run) => run.depths.since || Infinity));
    return Number.isFinite(since) ? ` Watched since ${new Date(1000 * since).toLocaleString()} by \`asyncflow view\`; the run keeps no history of it.` : "";
  }

  options(series, bands, bars, whole) {
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--quiet").trim(), line = style.getPropertyValue("--line").trim();
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px system-ui" };
    const values = (plot, splits) => splits.map((value) => number(value)), time = Boolean(this.spec.depths);
    const clock = { ...axis, size: 48 }, steps = { ...axis, label: this.spec.x || "step", incrs: whole || !bars ? WHOLE_STEPS : undefined,
      labelSize: 16, labelGap: 3, labelFont: "11px system-ui", size: 24, values };
    return {
      width: this.box.clientWidth, height: 190, series, bands, legend: { show: false },
      scales: { x: { time, range: bars ? (plot, low, high) => { const pad = whole || low === high ? Math.max(0.5, (high - low) * 0.03) : (high - low) * 0.08;
        return [low - pad, high + pad]; } : undefined }, y: { range: bars ? (plot, low, high) => [0, high || 1] : roomFor } },
      axes: [time ? clock : steps, { ...axis, size: 56, values }],
      cursor: bars ? { drag: { x: false, y: false } } : { sync: { key: time ? "time" : "step" }, drag: { x: true, y: false } },
      hooks: { setCursor: [(plot) => this.tell(plot.cursor.idx)] },
    };
  }

  /** Say the values under the pointer, or the newest ones. */
  tell(index) {
    if (!this.plot) return;
    const { data, series } = this.plot, parts = [];
    const inside = index !== null && index !== undefined;
    series.forEach((one, place) => {
      if (place === 0 || one.hidden || one.curve.faint) return;
      const column = data[place];
      const last = column.findLastIndex((value) => value !== null && value !== undefined);
      let at = inside ? index : last;
      if (at > last) return;  // beyond the curve's end
      while (at >= 0 && (column[at] === null || column[at] === undefined)) at--;
      if (at >= 0 && (inside || !one.curve.bars)) parts.push(el("span", null, swatch(one.curve.colour, one.curve.dash),
        (one.curve.bars ? "" : one.label + " ") + number(column[at])));
    });
    const place = inside ? data[0][index] : null;
    const prefix = series.some((one) => one.curve && one.curve.bars) ? (inside ? number(place) + ": " : "point at a bar")
      : !inside ? "newest" : this.spec.depths ? new Date(1000 * place).toLocaleTimeString() : "step " + place;
    this.hover.replaceChildren(prefix, ...parts);
  }
}

// Samples, as chat

const GAP_RED = 0.5;  // nats

function textOf(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (Array.isArray(content) && content.every((part) => part && typeof part.text === "string"))
    return content.map((part) => part.text).join("\n");
  return JSON.stringify(content, null, 1);
}

function bubble(message) {
  const role = String(message.role || "?"), kind = ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
  const said = el("span", { class: "said", dir: "auto" }, textOf(message.content));
  const thought = message.reasoning_content ? el("span", { class: "said thought", dir: "auto" }, message.reasoning_content) : null;
  const calls = (message.tool_calls || []).map((call) => el("span", { class: "said", dir: "auto" },
    "→ " + ((call.function || {}).name || "?") + "(" + textOf((call.function || {}).arguments) + ")"));
  return el("div", { class: "bubble " + kind }, el("span", { class: "role" }, role), thought, said, calls);
}

/** The first drawn tokens, one box each: by the version that drew it, red the more, the further the engines differ. */
function drawnTokens(row) {
  const texts = row.tokens || [], gaps = row.gaps || [], probs = row.log_probs || [];
  if (!texts.length) return null;
  const versions = (row.versions || []).flatMap(([version, count]) => Array(count).fill(version));
  const boxes = texts.map((text, place) => {
    const gap = gaps[place] ?? null, many = versions[place] !== versions[0];
    const box = el("span", { class: "token" + (many ? " later" : ""), title: `token ${place}` + (versions[place] === undefined ? "" : `, version ${versions[place]}`)
      + (probs[place] === undefined || probs[place] === null ? "" : `, log-probability ${number(probs[place])}`)
      + (gap === null ? "" : `, engine minus trainer ${number(gap)}`) }, text || " ");
    if (gap !== null) box.style.setProperty("--gap", Math.min(1, Math.abs(gap) / GAP_RED).toFixed(3));
    return box;
  });
  const known = gaps.filter((gap) => gap !== null), mean = known.reduce((sum, gap) => sum + Math.abs(gap), 0) / known.length;
  return el("details", null, el("summary", null, `drawn tokens${row.response_tokens > texts.length ? `, the first ${texts.length}` : ""}`
    + (known.length ? `: engine and trainer differ by ${number(mean)} nats on average` : "")),
    el("div", { class: "tokens" }, boxes),
    el("p", { class: "note" }, "Red: engine and trainer differ, fully at 0.5 nats, in part because the trainer is a few updates "
      + "ahead. Underlined: drawn by a later version than the first token. Hover for the figures."));
}

function tokens(row) {
  if (!row.samples || !row.samples.length) return null;
  return el("details", null, el("summary", null, "tokens as they are trained"), row.samples.map((runs) =>
    el("pre", null, runs.map(([drawn, text]) => drawn ? el("mark", null, text) : el("span", null, text)))));
}

function sampleNode(row) {
  const talks = row.conversations && row.conversations.length ? row.conversations
    : [[{ role: "user", content: row.prompt }, { role: "assistant", content: row.response }]];
  const versions = (row.versions || []).map(([version, count]) => count + " by version " + version).join(", ");
  const parts = Object.entries(row.metrics || {}).map(([name, value]) => name + " " + number(value)).join(", ");
  const turns = row.turn_rewards && row.turn_rewards.length ? ` (turns: ${row.turn_rewards.map(number).join(", ")})` : "";
  return el("article", { class: "sample" },
    el("div", { class: "facts" }, el("b", null, row.reward === null || row.reward === undefined ? "no reward" : "reward " + number(row.reward) + turns),
      (String(row.file || "").startsWith("evaluate") ? " · held out" : "") + ` · step ${row.step} · group ${row.group} · row ${row.index} · ${row.response_tokens ?? "?"} tokens`
      + (versions ? ` (${versions})` : "") + (row.truncated ? " · truncated" : "") + (parts ? " · " + parts : "")),
    talks.map((talk) => el("div", { class: "talk" }, talk.map(bubble))),
    row.ground_truth ? el("div", { class: "bubble truth" }, el("span", { class: "role" }, "ground truth"),
      el("span", { class: "said", dir: "auto" }, row.ground_truth)) : null,
    drawnTokens(row), tokens(row), followed(row));
}

/** Where the row was: its worker, leases and training, as `asyncflow trace` says it. */
function followed(row) {
  if (page.source.frozen || !Number.isInteger(row.index) || !String(row.file || "").startsWith("rollout")) return null;
  const said = el("pre", null, "reading ..."), moments = el("div", { class: "moments" });
  return el("details", { ontoggle: async (event) => {
    if (!event.target.open) return;
    try {
      const found = await page.source.trace(page.current, row.index);
      said.textContent = shown(found.text || found.why);
      fill(moments, momentButtons(row.index, found.moments || []));
    } catch (error) { said.textContent = "no answer: " + error.message; }
  } }, el("summary", null, "follow this row"), said, moments);
}

/** Buttons that show a row's moments on the timeline: all of them, or one with the stretch until the next. */
function momentButtons(row, moments) {
  if (!moments.length) return [];
  const button = (text, from, to, chosen) => el("button", { class: "link", onclick: () => page.timeline.follow({ row, moments, from, to, chosen }) }, text);
  const first = moments[0][0], last = moments[moments.length - 1][0];
  return [button("show it on the timeline", first, last, null), ...moments.map(([at, what], place) =>
    button(`${place + 1}: +${(at - first).toFixed(3)} s ${what}`, at, (moments[place + 1] || [last])[0], place))];
}

function samplesPart() {
  const step = el("input", { placeholder: "steps, e.g. 3-10", size: 14, "aria-label": "steps" });
  const search = el("input", { type: "search", placeholder: "search prompts, responses, conversations", "aria-label": "search" });
  const order = el("select", { "aria-label": "order" }, [["newest", "newest first"], ["best", "highest reward first"],
    ["worst", "lowest reward first"]].map(([value, label]) => el("option", { value }, label)));
  const rows = el("div", { class: "rows" }), told = el("span", { class: "note" }), controls = el("div", { class: "controls" });
  let skip = 0, asked = 0;
  async function show(from) {
    skip = Math.max(0, from);
    const mine = ++asked;
    let found;
    try {
      const steps = stepsIn(step.value.trim());
      found = await page.source.samples(page.current,
        { step: steps ? steps.join("-") : "", search: search.value, order: order.value, skip, number: PER_PAGE });
    } catch (error) { fill(rows); told.textContent = "no samples: " + error.message; return; }
    if (mine !== asked) return;  // a later question is under way
    fill(rows, found.rows.map(sampleNode));
    controls.hidden = !found.steps;
    const damaged = found.unreadable ? `; ${found.unreadable} lines cannot be read` : "";
    told.textContent = !found.steps ? (found.unreadable ? `no samples that can be read${damaged}` : "no samples yet; see rollout.samples_per_step")
      : `${found.total ? skip + 1 : 0} to ${Math.min(skip + PER_PAGE, found.total)} of ${found.total} kept rollouts, `
        + `of steps ${found.steps[0]} to ${found.steps[1]}` + damaged + (page.source.frozen ? "; all kept ones: asyncflow view" : "");
    back.disabled = skip === 0;
    on.disabled = skip + PER_PAGE >= found.total;
  }
  const back = el("button", { onclick: () => show(skip - PER_PAGE) }, "previous");
  const on = el("button", { onclick: () => show(skip + PER_PAGE) }, "next");
  for (const input of [step, search, order]) input.addEventListener("change", () => show(0));
  const node = el("section", null, el("h2", { id: "samples" }, "What does it say?"),
    el("p", { class: "note" }, "Whole conversations. Read the best and the worst: a high reward for nonsense is a loophole "
      + "in the reward, a low one for a right answer is a fault of it."), controls, told, rows);
  fill(controls, order, step, search, page.source.frozen ? null : el("button", { onclick: () => show(0) }, "read again"), back, on);
  // What somebody may be reading stays until "read again".
  const unread = () => skip === 0 && node.getBoundingClientRect().top > window.innerHeight;
  return { node, show: () => show(0), showFirst: () => (!rows.childElementCount || unread()) && show(0) };
}

// Logs

function logsPart() {
  const choice = el("select", { "aria-label": "log" }), text = el("pre");
  let position = null, asked = 0;
  async function list() {
    let names = [];
    try { names = await page.source.logs(page.current); } catch { /* the server is gone; the header says so */ }
    const before = choice.value;
    fill(choice, names.map((name) => el("option", { value: name, selected: name === before ? "" : null }, name)));
    await read(true);
  }
  async function read(anew) {
    if (!choice.value) { text.textContent = "no logs yet"; return; }
    let tail;
    const number = ++asked;  // an answer counts if nothing was asked since
    try { tail = await page.source.log(page.current, choice.value, anew ? null : position); } catch { return; }
    if (number !== asked) return;
    const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 30;
    if (tail.follows) text.append(shown(tail.text)); else text.textContent = shown(tail.text) || "(empty)";
    if (text.textContent.length > 400000) text.textContent = text.textContent.slice(-200000);
    position = tail.position;
    if (anew || atEnd) text.scrollTop = text.scrollHeight;
  }
  choice.addEventListener("change", () => { position = null; read(true); });
  const details = el("details", { ontoggle: () => details.open && list() },
    el("summary", null, "logs of every process, with what your own functions print"),
    el("div", { class: "controls" }, choice), text);
  return { node: details, open: () => { details.open = true; }, update: () => details.open && !page.source.frozen && read(false), show: () => details.open && list() };
}

// Where the time went, the plan, what runs now, failures, settings

function shadesOf(categories) {
  return categories.map((name, place) => name === "busy" ? "#2e9e6b" : name === "other" ? "#b9c0cc" : name === "paused" ? "#667085"
    : ["#d9822b", "#e0b13a", "#b8479d", "#7a5cd0", "#128a9c", "#8a5a2b"][(place - 1) % 6]);
}

/** What every process does: a row each, spans by kind. The wheel zooms, dragging moves, a double click shows everything. */
function timelinePart() {
  const LABEL = 110, ROW = 17, last = el("select", { "aria-label": "time shown" }, [[10, "10 s"], [60, "1 min"], [300, "5 min"], [3600, "1 h"]]
    .map(([value, label]) => el("option", { value }, "the last " + label)));
  const canvas = el("canvas", { class: "spans", "aria-label": "timeline" }), told = el("div", { class: "hover" }), why = el("p", { class: "note" });
  const unit = el("span", { class: "unit" }), newest = el("button", { onclick: () => { row = null; known = null; show(); } }, "the newest again");
  let known = null, view = null, dragged = null, row = null;  // row: what is followed, and on which run
  const xOf = (time) => LABEL + (time - view[0]) / (view[1] - view[0]) * (canvas.clientWidth - LABEL);
  const timeOf = (x) => view[0] + (x - LABEL) / (canvas.clientWidth - LABEL) * (view[1] - view[0]);
  function draw() {
    if (!known || !canvas.clientWidth) return;
    const scale = window.devicePixelRatio || 1, height = ROW * known.processes.length + (row ? 30 : 16), shades = shadesOf(known.categories);
    canvas.style.height = height + "px"; canvas.width = canvas.clientWidth * scale; canvas.height = height * scale;
    const pen = canvas.getContext("2d"), quiet = getComputedStyle(document.documentElement).getPropertyValue("--quiet");
    pen.scale(scale, scale); pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
    known.processes.forEach((process, place) => {
      for (const [start, length, , kind] of process.spans) {
        const left = Math.max(LABEL, xOf(start)), right = Math.min(canvas.clientWidth, xOf(start + length));
        if (right < LABEL || left > canvas.clientWidth) continue;
        pen.fillStyle = shades[kind]; pen.fillRect(left, place * ROW + 2, Math.max(0.7, right - left), ROW - 4);
      }
      pen.fillStyle = quiet; pen.fillText(shown(process.name), 0, place * ROW + ROW / 2, LABEL - 6);
    });
    pen.fillStyle = quiet;
    for (const share of [0, 0.25, 0.5, 0.75]) pen.fillText(number(timeOf(LABEL + share * (canvas.clientWidth - LABEL)) - (row ? row.moments[0][0] - known.origin : known.end)) + " s",
      LABEL + share * (canvas.clientWidth - LABEL), height - 7);
    if (row) drawMoments(pen, height);
  }
  /** A line at each moment of the row, with its number, and a dot where it happened. */
  function drawMoments(pen, height) {
    row.moments.forEach(([at, , name], place) => {
      const x = xOf(at - known.origin), line = known.processes.findIndex((process) => process.name === name);
      if (x < LABEL || x > canvas.clientWidth) return;
      pen.fillStyle = "#c23b3b";
      pen.fillRect(x - (place === row.chosen ? 1 : 0.5), 0, place === row.chosen ? 2 : 1, height - 28);
      pen.fillText(String(place + 1), Math.min(x - 3, canvas.clientWidth - 14), height - 21);
      if (line < 0) return;
      pen.beginPath(); pen.arc(x, line * ROW + ROW / 2, 4, 0, 2 * Math.PI); pen.fill();
    });
  }
  function momentsAt(x) {
    return row ? row.moments.map(([at, what], place) => [Math.abs(xOf(at - known.origin) - x), `${place + 1}: ${what}`])
      .filter(([far]) => far < 5).map(([, what]) => what) : [];
  }
  function follow(wanted) {
    const room = Math.max(0.02, 0.1 * (wanted.to - wanted.from));
    row = { ...wanted, run: page.current, stretch: { from_ms: Math.floor(1000 * (wanted.from - room)), to_ms: Math.ceil(1000 * (wanted.to + room)) } };
    known = null; told.textContent = "";
    return show().then(() => node.scrollIntoView({ block: "center" }));
  }
  async function show() {
    if (row && row.run !== page.current) { row = null; known = null; }
    const mine = row;
    let found;
    try { found = await page.source.timeline(page.current, row ? row.stretch : { last: last.value }); } catch { return; }
    if (!found || mine !== row) return;
    newest.hidden = !row;
    unit.textContent = row ? `row ${row.row}${row.chosen === null ? "" : ` from moment ${row.chosen + 1}`}, seconds since moment 1` : "seconds before the newest span";
    why.textContent = found.why || ""; canvas.hidden = Boolean(found.why);
    node.hidden = canvas.hidden && !page.runs[page.current].now.step;
    if (found.why) return;
    const whole = !known || (view[0] === 0 && view[1] === known.end);
    if (!whole && dragged === null) view = view.map((time) => time + known.origin - found.origin);  // the same moments
    known = found;
    if (whole) view = [0, Math.max(known.end, 1e-3)];
    draw();
  }
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const at = timeOf(Math.max(LABEL, event.offsetX)), factor = event.deltaY > 0 ? 1.25 : 0.8;
    view = [Math.max(0, at + (view[0] - at) * factor), Math.min(known.end, at + (view[1] - at) * factor)];
    draw();
  }, { passive: false });
  canvas.addEventListener("dblclick", () => { view = [0, known.end]; draw(); });
  canvas.addEventListener("pointerdown", (event) => { dragged = event.offsetX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (!known) return;
    if (dragged !== null) {
      const by = Math.max(-view[0], Math.min(known.end - view[1], timeOf(dragged) - timeOf(event.offsetX)));
      view = [view[0] + by, view[1] + by]; dragged = event.offsetX;
      draw();
    }
    const process = known.processes[Math.floor(event.offsetY / ROW)], at = timeOf(event.offsetX);
    const spans = process && event.offsetX >= LABEL ? process.spans.filter(([start, length]) => start <= at && at <= start + length) : [];
    const moments = momentsAt(event.offsetX);
    told.textContent = moments.length ? shown(`row ${row.row}, ` + moments.join("; ")) : spans.length ? shown(process.name + ": " + spans.map(([, length, name, , more]) =>
      `${name} ${number(length)} s${more ? " (" + more + ")" : ""}`).join(" in ")) : "";
  });
  last.addEventListener("change", () => { row = null; known = null; show(); });
  new ResizeObserver(draw).observe(canvas);
  const node = el("section", { class: "panel wide" }, el("h3", null, "Timeline ", unit),
    page.source.frozen ? null : el("div", { class: "controls" }, last, newest), why, canvas, told,
    el("p", null, "Colours as above. The wheel zooms, dragging moves, a double click shows everything. "
      + (page.source.frozen ? "" : "Rollouts below can be followed through it. ") + "`asyncflow timeline` draws the whole run."));
  return { node, show, follow, showNewest: () => {
    if (row && row.run === page.current) return;
    const { top, bottom } = node.getBoundingClientRect();
    if (node.hidden || (dragged === null && bottom > 0 && top < window.innerHeight)) return show();
  } };
}

async function showAccount(node) {
  let account;
  try { account = await page.source.account(page.current); } catch { return; }
  node.parentNode.hidden = Boolean(account.why) && !page.runs[page.current].now.step;
  if (account.why) { fill(node, el("p", { class: "note" }, account.why)); return; }
  const shades = shadesOf(account.categories);
  const rows = Object.entries(account.roles).map(([role, shares]) => {
    const bar = el("div", { class: "stack" });
    account.categories.forEach((name, place) => {
      const part = el("i", { title: name + " " + (100 * shares[name]).toFixed(1) + " %" });
      part.style.width = 100 * shares[name] + "%";
      part.style.background = shades[place];
      bar.append(part);
    });
    return [role, bar, (100 * shares.busy).toFixed(0) + "\u00a0%\u00a0busy"];
  });
  const rare = (name) => ["paused", "waiting for devices"].includes(name) && !Object.values(account.roles).some((shares) => shares[name]);
  fill(node, table(["role", "share of the time since the first weights", ""], rows),
    el("div", { class: "key note" }, account.categories.map((name, place) => rare(name) ? null : el("span", null, swatch(shades[place]), name))),
    el("p", { class: "note" }, "Good: the costliest devices are busy. `asyncflow timeline` draws every span."));
}

function planNode(run) {
  const plan = run.now.plan || {}, newest = run.now.newest || {};
  if (!Object.keys(plan).length) return null;
  const lately = (name) => { const found = (run.values[name] || []).slice(-10).filter((value) => value !== null);
    return found.length ? found.reduce((a, b) => a + b, 0) / found.length : null; };
  // A plan counts responses' tokens alone; train_tokens_per_s has the prompts', too.
  const responses = lately("samples") * lately("response_tokens_mean") / lately("step_time_s") || null;
  const rows = [["time of a step (s)", plan.step_s, lately("step_time_s")], ["response tokens/s", plan.tokens_per_s, responses],
    ["response tokens/s and device", plan.tokens_per_s_per_device, responses && plan.devices ? responses / plan.devices : null],
    ...Object.entries(plan.idle_fraction || {}).map(([role, share]) => ["idle " + role, share, lately("idle_fraction/" + role)])];
  return el("section", { class: "panel wide" }, el("h3", null, "The plan beside what is measured"),
    table(["", "planned", "measured", "ratio"], rows.filter((row) => row[1] !== undefined && newest).map(([name, planned, measured]) =>
      [name, number(planned), number(measured), planned && measured ? number(measured / planned) : "-"])),
    el("p", null, "Means of the last ten points. A ratio far from 1: measure the model with `asyncflow profile`, and plan again."));
}

/** Opens the stack of a process that was started again. */
function stackLink({ log, restarts }) {
  const stack = page.stacks.get(log);
  return restarts && stack ? el("button", { class: "link", onclick: () => { stack.open = true; stack.scrollIntoView(); } }, "stack") : null;
}

function nowNode(run) {
  const live = run.now.live;
  if (!live) return null;
  const parts = [table(["role", "ranks", "does", "weights"], live.roles.map((role) => [role.role, role.ranks, role.does, role.weights]))];
  if (live.pause) parts.unshift(el("p", null, live.pause));
  if (live.turn) parts.push(el("p", { class: "note" }, "devices: " + live.turn));
  parts.push(el("details", null, el("summary", null, "every process"), table(
    ["process", "state", "step", "weights", "no progress for", "restarts", "rollouts under way"],
    live.ranks.map((rank) => [rank.name, rank.state + (rank.detail ? " " + rank.detail : ""), rank.step,
      rank.version === null ? "" : "v" + rank.version, duration(rank.idle_s), [rank.restarts, stackLink(rank)],
      rank.rollouts.live === undefined ? "" : number(rank.rollouts.live)]))));
  if (live.queue.length) {
    const room = live.room[0];
    parts.push(el("h3", null, "Queue"), room ? el("p", { class: "note" }, `${room.live_rows}${room.row_limit ? " of " + room.row_limit : ""} rows live, `
      + `${room.waiting_puts} puts wait for room` + (room.lost_rows ? `, ${room.lost_rows} rows lost with a unit` : "")) : null,
    table(["task", "waiting for columns", "ready", "leased", "done", "rows/s"], live.queue.map((task) =>
      [task.task, task.waiting, task.ready, task.leased, task.acked, number(task.rows_per_s)])),
    el("p", { class: "note" }, "Good: few ready rows. A task whose ready rows grow is slower than those before it."));
  } else parts.push(el("p", { class: "note" }, "The queue does not answer yet."));
  if (live.advice) parts.push(el("p", null, "Advice: " + live.advice));
  return el("section", null, el("h2", { id: "now" }, "What runs now?"), el("div", { class: "panel wide" }, parts));
}

function failuresNode(run) {
  const state = run.now, parts = [], source = state.live || state.end || {};
  const restarts = source.restarts || { gangs: {} };
  const again = Object.entries(restarts.gangs || {}).map(([name, times]) => `${name} ${times}x`).join(", ");
  if (again || restarts.restores) parts.push(el("p", null, "Started again: " + (again || "nothing")
    + (restarts.restores ? `; ${restarts.restores}x back to a checkpoint` : "")));
  if (restarts.last_error) parts.push(el("div", { class: "problem" }, "last error: " + restarts.last_error));
  for (const [kind, why] of Object.entries((state.live || {}).failures || {}))
    parts.push(el("div", { class: "problem" }, `the last ${kind} that failed: ${why}`));
  for (const problem of state.problems || []) parts.push(el("div", { class: "problem" }, problem));
  if (state.end) parts.push(el("pre", null, state.end.lines.join("\n")));
  if (!parts.length) parts.push(el("p", { class: "note" }, "Nothing failed."));
  return parts;
}

/** The newest stack in the log of each process that failed, asked for when a failure is new. */
function stacksPart() {
  const node = el("div");
  let known = "";
  async function update(run) {
    const { state, live, end } = run.now, { gangs, restores, last_error_at: at } = (live || end || {}).restarts || {};
    const failed = ["failed", "killed"].includes(state) || at, mine = JSON.stringify([page.current, state, gangs, restores, at]);
    if (mine === known || (state === "running" && !live)) return;
    known = mine;
    let found = { stacks: [] };
    try { if (failed) found = await page.source.stacks(page.current); } catch { if (mine === known) known = ""; return; }
    if (mine !== known) return;  // a later failure is being asked for
    const open = new Set([...page.stacks].filter(([, one]) => one.open).map(([log]) => log));
    page.stacks = new Map(found.stacks.map(({ log, what, after, text }) => [log, el("details", { class: "failure", open: open.has(log) ? "" : null },
      el("summary", null, `stack of ${log}: ${what}` + (after ? ` (after ${after.replace("T", " ")})` : "")), el("pre", null, text))]));
    fill(node, [...page.stacks.values()], page.stacks.size ? el("p", { class: "note" }, "The newest stack in the log of each process that failed, or whose role "
      + "was started again. A process that was killed, e.g. for want of memory, leaves none; a stack in its log is then an older one.") : null);
  }
  return { node, update };
}

async function showSettings(node) {
  let settings;
  try { settings = await page.source.settings(); } catch { return; }
  const parts = [];
  if (page.runs.length > 1) parts.push(settings.differences.length
    ? table(["setting", ...page.runs.map((run) => run.now.name)], settings.differences.map(([key, values]) => [key, ...values]))
    : el("p", { class: "note" }, "The settings are the same."));
  settings.text.forEach((text, place) => parts.push(el("details", null, el("summary", null, "config.yaml of " + page.runs[place].now.name), el("pre", null, text))));
  fill(node, parts);
}

// The page

/** Show what a run does in the header. Its buttons stay the same elements while they mean the same, so that none is
 * replaced under the pointer. */
function header(run, place) {
  const { now } = run;
  if (!run.head) {
    const dot = el("span", { class: "dot" }), state = el("span"), told = el("span"), buttons = el("span", { class: "run" });
    dot.style.background = COLOURS[place % COLOURS.length];
    run.head = { node: el("span", { class: "run" }, dot, el("b", null, now.name), state, told, buttons), state, told, buttons, meaning: "" };
  }
  const { head } = run, pause = (now.live || {}).pause || "", state = pause.split(" ")[0] || now.state;
  const last = run.values.step_time_s ? run.values.step_time_s.slice(-20).filter((value) => value !== null).sort((a, b) => a - b) : [];
  const left = now.state === "running" && !pause && now.steps && last.length ? (now.steps - now.step) * last[Math.floor(last.length / 2)] : null;
  head.state.className = "state " + state;
  head.state.textContent = state;
  head.told.textContent = shown([now.step || now.steps ? `step ${now.step}${now.steps ? "/" + now.steps : ""}` : "",
    now.time_s ? duration(now.time_s) : "", left === null ? "" : `about ${duration(left)} left`, state === "pausing" ? pause : ""]
    .filter((part) => part).join(" · "));
  const meaning = page.control && now.state === "running" ? state : "";
  if (meaning !== head.meaning) fill(head.buttons, meaning && controlButtons(now.name, place, meaning));
  head.meaning = meaning;
  return head.node;
}

function controlButtons(name, place, state) {
  const button = (what, label, says, question) => el("button", { title: says, onclick: async (event) => {
    if (question && !confirm(question)) return;
    event.target.disabled = true;
    const answer = await page.source.control(what, place);
    if (!answer.ok) alert("not done: " + answer.statusText);
    setTimeout(() => { event.target.disabled = false; }, 2 * POLL_MS);  // the page shows by then what came of it
  } }, label);
  return [
    state === "running"
      ? button("pause", "pause", "Give out no more steps. Those that were are still generated and trained; then everything rests.")
      : button("resume", "resume", "Give out steps again"),
    state === "paused" ? null : button("save", "save after this step", "Write a checkpoint after the step in progress, and go on"),
    button("stop", "save and stop", "As Ctrl-C: save the last step and end", `Save ${name} and stop it? It can be resumed.`),
  ];
}

/** How runs ended that did not end by themselves, with how to go on; the report has it in its summary. */
function endings() {
  if (page.source.frozen) return [];
  return page.runs.filter((run) => ["killed", "failed", "unknown"].includes(run.now.state) && run.now.end).map((run) => {
    const lines = run.now.end.lines, resume = lines.find((line) => line.startsWith("resume with: ")) || "";
    return el("div", { class: "problem ended" }, (page.runs.length > 1 ? run.now.name + ": " : "") + [lines[lines.length - 1], resume].join("\n").trim());
  });
}

function cards() {
  if (page.runs.length > 1) {
    const known = CARDS.filter(([name]) => page.runs.some((run) => (run.now.newest || {})[name] !== undefined));
    return table(["newest step", ...known.map(([, label]) => label)], page.runs.map((run) => [run.now.name, ...known.map(([name]) => number((run.now.newest || {})[name]))]));
  }
  const [run] = page.runs, newest = run.now.newest || {};
  const found = CARDS.filter(([name]) => newest[name] !== undefined && newest[name] !== null)
    .map(([name, label]) => el("div", { class: "figure" }, el("b", null, number(newest[name])), el("span", null, label)));
  const evaluation = run.evaluations[run.evaluations.length - 1];
  if (evaluation && evaluation.accuracy !== undefined) found.splice(2, 0, el("div", { class: "figure" }, el("b", null, number(evaluation.accuracy)),
    el("span", null, evaluation.accuracy_low === undefined ? "held-out accuracy"
      : `held-out accuracy (${number(evaluation.accuracy_low)} to ${number(evaluation.accuracy_high)})`)));
  return found.length ? el("div", { class: "figures" }, found) : el("p", { class: "note" }, run.now.state === "running"
    ? "No step is finished yet. The logs below say what goes on." : (run.now.problems || []).length
      ? "No step can be read: see What failed?" : "No step was finished. The logs below say why.");
}

function build(root) {
  const runs = el("div", { class: "bar" }), told = el("span", { class: "note" }), top = el("div");
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, "aria-label": "smoothing" });
  const weight = el("span", null, "0");
  slider.addEventListener("input", () => { page.smoothing = Number(slider.value); weight.textContent = slider.value; updatePanels(); });
  const choice = el("select", { "aria-label": "run" });
  choice.addEventListener("change", () => { page.current = Number(choice.value); updatePanels(); details(); });
  const links = [...SECTIONS.map((section) => [section.id, section.title]), ["now", "What runs now?"], ["samples", "What does it say?"],
    ["failures", "What failed?"], ["settings", "Settings"]];
  const chooser = el("label", null, "details of ", choice);
  const head = el("header", null, runs, el("div", { class: "bar" },
    el("nav", null, links.map(([id, title]) => el("a", { href: "#" + id }, title))),
    el("label", null, "smoothing ", slider, " ", weight), chooser, told));
  const sections = SECTIONS.map((section) => {
    const panels = section.panels.map((spec) => new Panel(spec));
    page.panels.push(...panels);
    const extra = section.id === "speed" ? el("div", { class: "grid" }) : null;
    const node = el("section", null, el("h2", { id: section.id }, section.title), el("div", { class: "grid" }, panels.map((panel) => panel.node)), extra);
    return { node, extra, panels };
  });
  const speed = sections.find((section) => section.extra).extra, account = el("div", null), plan = el("div", { class: "wide" }), now = el("div"), failures = el("div"), settings = el("div");
  const accountPanel = el("section", { class: "panel wide" }, el("h3", null, "Where the time went"), account);
  const samples = samplesPart(), stacks = stacksPart(), logs = logsPart(), timeline = timelinePart();
  page.timeline = timeline;
  fill(speed, accountPanel, timeline.node, plan);
  const others = el("div", { class: "grid" }), drawn = new Set(SECTIONS.flatMap((section) => section.panels.flatMap((panel) => panel.figures || [])));
  const known = new Map();
  const rest = el("details", { ontoggle: () => rest.open && updatePanels() }, el("summary", null, "every other figure"),
    el("p", { class: "note" }, "No range of these is right for every run: good is a curve that is steady, or that moves as the panels above explain. "
      + "One that jumps at the step where reward, KL or entropy turn says why. docs/metrics.md has the meaning and the unit of each."), others);
  fill(root, head, top, sections.map((section) => section.node), now, samples.node,
    el("section", null, el("h2", { id: "failures" }, "What failed?"), failures, stacks.node, logs.node),
    el("section", null, el("h2", { id: "settings" }, "Settings"), settings), el("section", null, el("h2", null, "The rest"), rest));

  async function details() {
    samples.show(); logs.show(); stacks.update(page.runs[page.current]);
    await showTimes(timeline.show);
  }
  async function showTimes(showTimeline) {
    await Promise.all([showAccount(account), showTimeline()]);
    hideEmpty(); updateLinks();
  }
  function addOthers() {
    const names = [...new Set(page.runs.flatMap((run) => Object.keys(run.values)))].sort();
    for (const name of names) {
      if (drawn.has(name) || [...drawn].some((one) => one.endsWith("/") && name.startsWith(one)) || known.has(name)) continue;
      const panel = new Panel({ title: name, unit: "", figures: [name] });
      known.set(name, panel); page.panels.push(panel); others.append(panel.node);
    }
  }
  function updatePanels() {
    for (const { node } of sections) node.hidden = false;  // a hidden panel has no width to draw in
    for (const panel of page.panels) panel.update();
    hideEmpty();
  }
  function hideEmpty() {
    for (const { node, panels, extra } of sections) node.hidden = panels.every((panel) => panel.node.hidden)
      && (!extra || [...extra.children].every((child) => child.hidden || !child.childElementCount));
  }
  /** Links to what is there: a run that has ended does nothing now, and one without steps has no curves. */
  function updateLinks() {
    for (const link of head.querySelectorAll("nav a")) {
      const target = document.getElementById(link.getAttribute("href").slice(1));
      link.hidden = !target || target.closest("[hidden]") !== null;
    }
  }
  dark.addEventListener("change", updatePanels);
  let first = true, finished = "", lateFor = 0, updates = 0;
  async function update() {
    let state;
    try {
      state = await page.source.state(page.runs.map((run) => run.have()).join(","));
      told.textContent = ""; lateFor = 0;
    } catch (error) {
      told.textContent = ++lateFor > 1 ? `no answer (${error.message}): is \`asyncflow view\` still running?` : "";
      return;
    }
    page.control = Boolean(state.control);
    state.runs.forEach((one, place) => { (page.runs[place] = page.runs[place] || new Run()).take(one); });
    document.title = page.runs.map((run) => run.now.name).join(", ") + " · AsyncFlow";
    const heads = page.runs.map(header);
    if (first) fill(runs, heads);
    if (first) fill(choice, page.runs.map((run, place) => el("option", { value: place }, run.now.name)));
    chooser.hidden = page.runs.length < 2;
    refill(top, endings(), cards());
    addOthers();
    updatePanels();
    const run = page.runs[page.current], open = [...now.querySelectorAll("details")].map((one) => one.open);
    fill(now, nowNode(run));
    now.querySelectorAll("details").forEach((one, place) => { one.open = Boolean(open[place]); });
    refill(plan, planNode(run));
    refill(failures, failuresNode(run));
    stacks.update(run);
    logs.update();
    if (first && run.now.end && !run.now.step) logs.open();
    const states = page.runs.map((one) => one.now.state).join();
    if (first || states !== finished) { showSettings(settings); details(); }
    else if (run.now.state === "running" && ++updates % 5 === 0) {
      if (updates % 15) timeline.showNewest();
      else { samples.showFirst(); showTimes(timeline.showNewest); }
    }
    updateLinks();
    first = false; finished = states;
  }
  async function goOn() {
    if (!document.hidden || first) await update();
    if (page.source.frozen) return;
    const live = first || lateFor || page.runs.some((run) => run.now.state === "running");
    setTimeout(goOn, live ? POLL_MS : FINISHED_POLL_MS);
  }
  return goOn();
}

const embedded = document.getElementById("data");
page.source = embedded ? frozenSource(JSON.parse(embedded.textContent)) : liveSource();
build(document.getElementById("page"));
