// Plots: pace and memory by uPlot, the timeline of slots on a canvas of its own. Each has a summary in words.

import { el, text } from "./dom.js";
import { clock, percent, rate, seconds, size } from "./words.js";

const HEIGHT = 190;
const LEGEND = [["fetching", "fetching"], ["collating", "collating"], ["sending", "sending"], ["waiting", "idle"],
  ["starting", "starting"], ["recycled", "recycled"], ["dead", "dead"]];

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim() || "gray";
}

function axes(units) {
  const line = { stroke: colour("rule"), width: 1 };
  return units.map(({ scale, values, side, grid, label, incrs }) => ({
    scale, ...(side === undefined ? {} : { side }), ...(label ? { label, labelSize: 16, labelFont: "11px system-ui" } : {}), stroke: colour("faint"), font: "11px system-ui",
    size: scale === "x" ? 26 : 56, ...(scale === "x" ? { space: 80 } : {}), ...(incrs ? { incrs } : {}), gap: 3, grid: { ...line, show: grid !== false }, ticks: { ...line, size: 4 }, ...(values ? { values } : {}),
  }));
}

const SIZES = Array.from({ length: 34 }, (_, n) => 2 ** (n + 10));
// Of one point uPlot would show a whole day.
const SPAN = ({ data: [times] }, from, to) => {
  const at = times[0] ?? Date.now() / 1000;
  return times.length < 2 ? [at - 5, at + 5] : [from, to];
};
const CLOCK = (_, marks) => marks.map((mark) => clock(mark));

class Plot {
  constructor(job, title) {
    this.job = job;
    this.summary = el("p", { class: "summary" });
    this.holder = el("div", { class: "plot", role: "img", "aria-label": title });
    this.node = el("section", {}, el("h3", {}, title), this.holder, this.summary);
    this.plot = null;
    this.shape = "";
  }

  width() { return Math.max(220, this.holder.clientWidth); }

  draw(shape, options, data) {
    const look = `${shape}|${document.documentElement.dataset.theme}`;
    if (!this.plot || this.shape !== look) {
      this.plot?.destroy();
      this.holder.replaceChildren();
      this.plot = new uPlot({ width: this.width(), height: HEIGHT, padding: [8, 26, 0, 0], ...options() }, data, this.holder);
      this.shape = look;
    } else {
      this.plot.setData(data);
    }
    this.holder.dataset.points = String(data[0].length);
  }

  resize() { if (this.plot && this.plot.width !== this.width()) this.plot.setSize({ width: this.width(), height: HEIGHT }); }

  tell(words) {
    text(this.summary, words);
    this.holder.setAttribute("aria-label", words);
  }
}

export class PacePlot extends Plot {
  constructor(job) { super(job, "Throughput, and how long the trainer waits"); }

  update() {
    const [times, rates, waits] = this.job.pace();
    const noun = `${this.job.noun}s`;
    this.draw("pace", () => ({
      cursor: { drag: { x: true, y: false } },
      scales: { x: { range: SPAN }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.08)] }, wait: { range: [0, 100] } },
      series: [{ value: (_, at) => (at ? clock(at) : "—") },
        { label: `${noun}/s`, stroke: colour("line"), width: 2, fill: colour("soft"), value: (_, v) => (v === null ? "—" : rate(v)) },
        { label: "waiting", scale: "wait", stroke: colour("mark"), width: 1.5, dash: [4, 3], value: (_, v) => (v === null ? "—" : `${Math.round(v)} %`) }],
      axes: axes([{ scale: "x", values: CLOCK }, { scale: "y", label: `${noun} a second` },
        { scale: "wait", side: 1, grid: false, label: "trainer waits, %" }]),
    }), [times, rates, waits]);
    if (!times.length) { this.tell("No figures yet: they come once a second."); return; }
    const recent = rates.slice(-5);
    const now = recent.reduce((a, b) => a + b, 0) / recent.length;
    const { wait_seconds: wait = 0, trainer_seconds: own = 0 } = this.job.snapshot;
    this.tell(`${this.job.alive ? "Now" : "At the end"} ${rate(now)} ${noun} a second, ${rate(Math.max(...rates))} at best. `
      + `The trainer has waited ${percent(wait + own > 0 ? wait / (wait + own) : 0)} of its time, ${seconds(wait)} in all.`);
  }
}

const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];

export class MemoryPlot extends Plot {
  constructor(job) { super(job, "Memory of each worker"); }

  update() {
    const slots = this.job.slotNumbers().slice(0, 64);
    const data = this.job.memory(slots);
    const limit = this.job.snapshot.memory_limit ?? this.job.about.limits?.memory ?? null;
    if (limit) data.push(data[0].map(() => limit));
    this.draw(`memory ${slots.join()} ${limit}`, () => ({
      cursor: { drag: { x: true, y: false } },
      legend: { show: slots.length <= 8 },
      scales: { x: { range: SPAN }, y: { range: (_, low, high) => [0, Math.max(1 << 20, high * 1.12)] } },
      series: [{ value: (_, at) => (at ? clock(at) : "—") },
        ...slots.map((slot, place) => ({ label: `worker ${slot}`, stroke: colour(`slot${place % 8}`), width: 1.75,
          dash: DASHES[Math.floor(place / 8) % 4], spanGaps: false, value: (_, v) => size(v) })),
        ...(limit ? [{ label: "limit", stroke: colour("mark"), width: 1.5, dash: [6, 4], points: { show: false }, value: (_, v) => size(v) }] : [])],
      axes: axes([{ scale: "x", values: CLOCK }, { scale: "y", incrs: SIZES, values: (_, marks) => marks.map((mark) => size(mark)) }]),
      hooks: { draw: [(plot) => this.marks(plot)] },
    }), data);
    const ends = this.job.ends();
    const died = ends.filter((end) => end.died).length;
    const held = (this.job.snapshot.slots ?? []).filter((slot) => slot.memory?.private).map((slot) => slot.memory.private);
    const top = held.length ? `The largest worker has ${size(Math.max(...held))}` : "No worker is measured now";
    this.tell(`${top}${limit ? `, the limit is ${size(limit)}` : ", there is no limit"}. `
      + `Recycled (▲): ${ends.length - died}. Died (✕): ${died}.`);
  }

  marks(plot) {
    const { ctx } = plot;
    const { left, top, width, height } = plot.bbox;
    const unit = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    for (const end of this.job.ends()) {
      const x = plot.valToPos(end.time, "x", true);
      const y = end.bytes === null ? top + height - 7 * unit : plot.valToPos(end.bytes, "y", true);
      const r = 5 * unit;
      ctx.beginPath();
      ctx.lineWidth = 2 * unit;
      if (end.died) {
        ctx.strokeStyle = colour("mark");
        ctx.moveTo(x - r, y - r); ctx.lineTo(x + r, y + r); ctx.moveTo(x + r, y - r); ctx.lineTo(x - r, y + r);
        ctx.stroke();
      } else {
        ctx.fillStyle = colour("recycled");
        ctx.moveTo(x, y - r); ctx.lineTo(x + r, y + r * 0.8); ctx.lineTo(x - r, y + r * 0.8); ctx.closePath();
        ctx.fill();
      }
    }
    ctx.restore();
  }
}

export class Timeline {
  constructor(job) {
    this.job = job;
    this.canvas = el("canvas", { role: "img", class: "timeline" });
    this.summary = el("p", { class: "summary" });
    const here = Boolean(job.snapshot.here); // no workers: the trainer fetches and collates, or does its own work
    this.legend = here ? [["fetching", "fetching"], ["collating", "collating"], ["waiting", "its own work"]] : LEGEND;
    const legend = el("ul", { class: "legend" }, this.legend.map(([name, words]) => el("li", {}, el("i", { class: `swatch ${name}` }), words)));
    this.node = el("section", {}, el("h3", {}, here ? "What the trainer did when" : "What each worker did when"), this.canvas, legend, this.summary);
  }

  update() {
    const rows = this.job.stretches();
    const ticks = this.job.ticks;
    const box = this.canvas;
    const unit = devicePixelRatio || 1;
    const width = Math.max(220, box.parentElement?.clientWidth ?? 300);
    const each = rows.size > 16 ? 10 : 18;
    const height = rows.size * each + 18;
    box.width = width * unit;
    box.height = height * unit;
    box.style.width = `${width}px`;
    box.style.height = `${height}px`;
    const ctx = box.getContext("2d");
    ctx.scale(unit, unit);
    const left = 24, from = ticks.length ? ticks[0].time - 1 : 0;
    const to = Math.max(this.job.snapshot.time ?? 0, ticks.at(-1)?.time ?? 1, from + 1);
    const x = (time) => left + ((time - from) / (to - from)) * (width - left);
    ctx.font = "11px system-ui";
    ctx.textBaseline = "middle";
    let line = 0;
    const shares = {};
    for (const [slot, stretches] of rows) {
      const y = line * each;
      ctx.fillStyle = colour("faint");
      if (each > 12 && !this.job.snapshot.here) ctx.fillText(String(slot), 2, y + each / 2);
      ctx.fillStyle = colour("empty");
      ctx.fillRect(left, y + 1, width - left, each - 3);
      for (const piece of stretches) {
        const long = Math.max(0, piece.to - piece.from);
        shares[piece.what] = (shares[piece.what] ?? 0) + long;
        ctx.fillStyle = colour(piece.what === "dead" ? "mark" : piece.what);
        const least = piece.what === "dead" || piece.what === "recycled" ? 4 : 1; // an end lasts milliseconds, and must be seen
        ctx.fillRect(x(piece.from), y + 1, Math.max(least, x(piece.to) - x(piece.from)), each - 3);
      }
      line += 1;
    }
    ctx.fillStyle = colour("faint");
    if (ticks.length) {
      ctx.fillText(clock(from), left, height - 8);
      ctx.textAlign = "right";
      ctx.fillText(clock(to), width - 2, height - 8);
    }
    const all = Object.values(shares).reduce((a, b) => a + b, 0);
    const deaths = this.job.of("worker-died").length;
    const words = all ? `Looked at once a second: ${this.legend.filter(([name]) => shares[name] / all >= 0.01)
      .map(([name, said]) => `${said} ${percent(shares[name] / all)}`).join(", ")}.${this.job.snapshot.here ? "" : ` Deaths: ${deaths}.`}` : "Nothing yet.";
    text(this.summary, words);
    box.setAttribute("aria-label", words);
    box.dataset.rows = String(rows.size);
  }

  resize() { this.update(); }
}
