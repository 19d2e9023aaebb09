// The page: listens to the stream, keeps the jobs, and has their cards drawn.

import { el, fill, keepRows, text } from "./dom.js";
import { Findings } from "./findings.js";
import { showIncident } from "./incident.js";
import { Job } from "./model.js";
import { MemoryPlot, PacePlot, Timeline } from "./plots.js";
import { Incidents, Quarantine, Slots } from "./tables.js";
import { ago, counted, day, percent, rate, seconds } from "./words.js";

const MOST_AT_FIRST = 4;
const jobs = new Map();
const cards = new Map();
const chosen = new Map(); // key → whether it is shown, where somebody said so
const at = (id) => document.getElementById(id);
let now = Date.now() / 1000;

class Card {
  constructor(job) {
    this.job = job;
    this.version = -1;
    this.state = el("span", { class: "state" });
    this.figures = el("dl", { class: "figures" });
    const rank = job.about.rank === null ? "" : `rank ${job.about.rank} of ${job.about.world_size ?? "?"}`;
    const title = el("h2", { id: `title-${job.key}` }, `${job.about.kind} `, el("b", {}, job.about.name), " ", rank ? el("span", { class: "rank" }, rank) : null, " ", this.state);
    this.findings = new Findings(job, announce);
    this.plots = [new PacePlot(job), new MemoryPlot(job), new Timeline(job)];
    this.tables = [new Slots(job), new Quarantine(job), new Incidents(job)];
    this.node = el("article", { class: "card job", "data-job": job.key, "aria-labelledby": `title-${job.key}` },
      el("header", {}, title, el("p", { class: "faint command" }, `${job.about.command} · pid ${job.about.pid} · ${job.about.folder}`)),
      this.findings.node, this.figures, this.plots.map((plot) => plot.node), this.tables.map((each) => each.node));
    this.plots[1].node.hidden = Boolean(job.snapshot.here); // there is no worker whose memory could be shown
  }

  update(force) {
    const { job } = this;
    text(this.state, job.alive ? "running" : `ended ${ago(job.snapshot.time ?? job.about.began, now)}`);
    this.state.classList.toggle("over", !job.alive);
    this.findings.update(now);
    this.tables[0].update();
    this.showFigures();
    if (!force && this.version === job.version) return;
    this.version = job.version;
    for (const part of [...this.plots, this.tables[1], this.tables[2]]) part.update();
  }

  showFigures() {
    const shot = this.job.snapshot;
    const [, rates] = this.job.pace();
    const recent = rates.slice(-5);
    const pace = recent.length ? recent.reduce((a, b) => a + b, 0) / recent.length : 0;
    const all = (shot.wait_seconds ?? 0) + (shot.trainer_seconds ?? 0);
    const rows = [
      [`${this.job.noun}s/s`, this.job.alive ? rate(pace) : "—"], ["batches", String(shot.delivered ?? 0)], ["epoch", String(shot.epoch ?? 0)],
      ["trainer waits", percent(all ? shot.wait_seconds / all : 0)], ["waited", seconds(shot.wait_seconds ?? 0)], ["workers", String(shot.workers ?? 0)],
      ["restarts", String(shot.restarts ?? 0)], ["recycled", String(shot.recycled ?? 0)], ["quarantine", String(shot.quarantined ?? 0)],
    ];
    keepRows(this.figures, rows, ([name]) => name, ([name]) => el("div", {}, el("dt", {}, name), el("dd")), (shown, [, value]) => text(shown.lastChild, value));
  }
}

let lastNews = 0;
function announce(words) {
  if (Date.now() - lastNews < 1500) words = `${at("news").textContent} ${words}`;
  lastNews = Date.now();
  text(at("news"), words.slice(-400));
}

function isShown(job) {
  if (chosen.has(job.key)) return chosen.get(job.key);
  const living = [...jobs.values()].filter((each) => each.alive);
  const first = living.length ? living : [...jobs.values()].slice(-1);
  return first.slice(0, MOST_AT_FIRST).includes(job) || cards.has(job.key);
}

// The oldest run first, ranks of a run together.
function inOrder() {
  const begun = new Map();
  for (const { about: { run, began } } of jobs.values()) begun.set(run, Math.min(began, begun.get(run) ?? began));
  return [...jobs.values()].sort(({ about: a }, { about: b }) => begun.get(a.run) - begun.get(b.run)
    || a.run.localeCompare(b.run) || (a.rank ?? 0) - (b.rank ?? 0) || a.began - b.began);
}

function draw(force = false) {
  const all = inOrder();
  const shown = all.filter(isShown);
  keepRows(at("chooser"), all, (job) => job.key, (job) => {
    const box = el("input", { type: "checkbox", on: { change: () => { chosen.set(job.key, box.checked); draw(true); } } });
    return el("label", { class: "chip" }, box, el("span"));
  }, (node, job) => {
    const rank = job.about.rank === null ? "" : ` · rank ${job.about.rank}`;
    text(node.lastChild, `${job.about.name}${rank} · pid ${job.about.pid}${job.alive ? "" : " · ended"}`);
    node.firstChild.checked = shown.includes(job);
    node.classList.toggle("trouble", job.findings.some((finding) => finding.level === "bad"));
  });
  at("chooser").hidden = all.length < 2;
  keepRows(at("jobs"), shown, (job) => job.key, (job) => {
    const card = new Card(job);
    cards.set(job.key, card);
    return card.node;
  }, () => {});
  for (const key of [...cards.keys()]) if (!shown.some((job) => job.key === key)) cards.delete(key);
  at("nothing").hidden = all.length > 0;
  for (const card of cards.values()) card.update(force);
}

function take(told, whole) {
  now = told.time;
  text(at("link"), told.unreadable ? `live, without ${counted(told.unreadable, "job")} that cannot be read` : "live");
  if (whole) { // the first message of a connection: what is not in it is gone
    const there = new Set(told.jobs.map((job) => job.key));
    for (const key of jobs.keys()) if (!there.has(key)) jobs.delete(key);
  }
  for (const key of told.gone ?? []) jobs.delete(key);
  for (const job of told.jobs) {
    if (jobs.has(job.key)) jobs.get(job.key).take(job);
    else jobs.set(job.key, new Job(job));
  }
  document.documentElement.dataset.heard = String(Number(document.documentElement.dataset.heard ?? 0) + 1);
  draw();
}

function listen() {
  const stream = new EventSource("/api/stream");
  const heard = (whole) => (event) => { at("link").className = "live"; take(JSON.parse(event.data), whole); };
  stream.addEventListener("state", heard(true));
  stream.addEventListener("news", heard(false));
  stream.addEventListener("error", async () => {
    text(at("link"), "not connected: what is below is how it was");
    at("link").className = "lost";
    if (stream.readyState !== EventSource.CLOSED) return;
    setTimeout(listen, 2000);
    const answer = await fetch("/api/jobs").catch(() => null); // a stream does not tell why it was refused
    if (answer?.status === 401) text(at("link"), "the server has a new token: open the link that `outlive dash --list` prints");
  });
}

async function showPast() {
  const body = at("past-body");
  try {
    const response = await fetch("/api/incidents");
    const told = await response.json();
    if (!response.ok) throw new Error(told.error);
    const problems = told.problems.map((problem) => el("p", { class: "bad" }, problem));
    if (!told.runs.length) { fill(body, [...problems, el("p", { class: "faint" }, "The journal has no incidents.")]); return; }
    fill(body, problems.concat(told.runs.map((run) => el("details", { class: "run" },
      el("summary", {}, el("b", {}, run.command || "python"), ` · ${counted(run.count, "incident")} · ${day(run.last)}`, run.rank === null ? "" : ` · rank ${run.rank}`),
      el("p", { class: "faint" }, `${run.folder} · pid ${run.pid} on ${run.host} · ${Object.entries(run.verdicts).map(([name, count]) => `${name} ${count}`).join(", ")}`),
      el("ol", { class: "incidents" }, run.incidents.map((each) => el("li", {}, el("time", {}, day(each.time)), " ",
        el("button", { type: "button", class: "open-incident", on: { click: () => showIncident(each.id, each) } }, each.sentence))))))));
  } catch (error) {
    fill(body, el("p", { class: "bad" }, String(error.message)));
  }
}

function nameTheme() {
  const dark = document.documentElement.dataset.theme === "dark";
  text(at("theme"), dark ? "light" : "dark");
  at("theme").setAttribute("aria-label", `switch to ${dark ? "light" : "dark"} colours`);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  nameTheme();
  draw(true);
}

at("theme").addEventListener("click", () => {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("outlive-theme", theme); } catch { /* it is then chosen for this visit only */ }
  setTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
  let own = null;
  try { own = localStorage.getItem("outlive-theme"); } catch { /* as above */ }
  if (!own) setTheme(event.matches ? "dark" : "light");
});
at("past").addEventListener("toggle", () => { if (at("past").open) showPast(); });
let pending = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(() => { for (const card of cards.values()) for (const plot of card.plots) plot.resize(); });
});
nameTheme();
listen();
