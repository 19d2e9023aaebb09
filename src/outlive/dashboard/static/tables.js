// Tables of one job: slots as they are now, what is in quarantine, what happened.

import { el, keepRows, text } from "./dom.js";
import { askSlot, showIncident } from "./incident.js";
import { groupOf } from "./model.js";
import { clock, counted, seconds, size } from "./words.js";

const MOST_SHOWN = 200;

function table(caption, heads) {
  const body = el("tbody");
  const made = el("table", {}, el("caption", { class: "unseen" }, caption),
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))), body);
  return [el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, made), body];
}

function row(names) {
  return el("tr", {}, names.map((name) => el("td", { "data-of": name })));
}

function put(shown, name, words) {
  text(shown.querySelector(`[data-of="${name}"]`), words);
}

export class Slots {
  constructor(job) {
    this.job = job;
    const [holder, body] = table("Workers as they are now", ["worker", "does", `${job.noun} in hand`, "for", "memory", "CPU", "so far", "ask"]);
    this.body = body;
    this.node = el("section", {}, el("h3", {}, job.snapshot.here ? "Now" : "Workers now"), holder);
  }

  update() {
    const slots = (this.job.snapshot.slots ?? []).filter((slot) => slot.incarnation > 0);
    keepRows(this.body, slots, (slot) => slot.slot, (slot) => this.make(slot), (shown, slot) => this.show(shown, slot));
  }

  make(slot) {
    const made = row(["slot", "doing", "sample", "seconds", "memory", "cpu", "restarts", "ask"]);
    made.querySelector('[data-of="memory"]').append(el("span"), el("meter", { min: "0", max: "1", high: "0.85", low: "0.6", optimum: "0", "aria-label": `memory of worker ${slot.slot} against its limit` }));
    made.querySelector('[data-of="ask"]').append(...["stacks", "recycle"].map((what) => el("button", {
      type: "button", "data-what": what, "aria-label": `${what} of worker ${slot.slot}`, on: { click: () => askSlot(this.job, slot.slot, what) } }, what)));
    made.querySelector('[data-of="doing"]').append(el("i", { class: "swatch" }), el("span"));
    return made;
  }

  show(shown, slot) {
    const name = slot.state === "here" ? "none: the trainer" : slot.slot;
    put(shown, "slot", slot.pid ? `${name} (pid ${slot.pid})` : String(name));
    const doing = slot.pid ? slot.doing : slot.state === "closed" ? "has gone" : "nobody is there";
    text(shown.querySelector('[data-of="doing"] span'), doing);
    shown.querySelector(".swatch").className = `swatch ${slot.pid ? groupOf(slot.stage) : slot.state === "closed" ? "waiting" : "dead"}`;
    put(shown, "sample", slot.sample === null ? (slot.batch >= 0 ? `batch ${slot.batch}` : "—") : String(slot.sample));
    const ofLimit = slot.limit ? ` of ${seconds(slot.limit)}` : ""; // when it is taken for hung
    put(shown, "seconds", slot.pid ? `${seconds(slot.seconds)}${ofLimit}` : "—");
    const { private: held, limit } = slot.memory ?? {};
    text(shown.querySelector('[data-of="memory"] span'), held ? size(held) + (limit ? ` of ${size(limit)}` : "") : "—");
    const meter = shown.querySelector("meter");
    meter.hidden = !(held && limit);
    if (held && limit) meter.value = Math.min(1, held / limit);
    put(shown, "cpu", slot.cpu === null ? "—" : `${Math.round(slot.cpu * 100)} %`);
    put(shown, "restarts", slot.state === "here" ? "—" : counted(slot.incarnation, "worker"));
    for (const button of shown.querySelectorAll("button")) button.disabled = !slot.pid || (slot.state === "here" && button.dataset.what === "recycle");
  }
}

export class Quarantine {
  constructor(job) {
    this.job = job;
    const id = `search-${job.key}`;
    this.search = el("input", { type: "search", id, placeholder: "sample, verdict, cause …", on: { input: () => this.update() } });
    const [holder, body] = table("Samples in quarantine", [job.noun, "verdict", "worker", "when", "done", "why"]);
    this.body = body;
    this.count = el("p", { class: "summary", role: "status" });
    this.holder = el("div", {}, el("label", { for: id }, "search "), this.search, this.count, holder);
    this.empty = el("p", { class: "faint" }, `No ${job.noun} was left out or replaced.`);
    this.node = el("section", { class: "quarantine" }, el("h3", {}, "Quarantine"), this.empty, this.holder);
  }

  update() {
    const told = new Map(this.job.of("incident").map((event) => [event.id, event]));
    const rows = this.job.of("quarantine").flatMap((event) => (event.samples.length ? event.samples : ["?"]).map((sample, place) => {
      const incident = told.get(event.id);
      const named = incident?.described?.[place];
      return { key: `${event.n}-${place}`, sample: named ? `${sample} (${named})` : String(sample), verdict: event.verdict, slot: event.slot, time: event.time,
        done: event.replaced ? "replaced" : "left out", why: incident?.cause ?? "", event, incident };
    }));
    const wanted = this.search.value.trim().toLowerCase();
    const found = rows.filter((each) => !wanted || `${each.sample} ${each.verdict} ${each.why} worker ${each.slot}`.toLowerCase().includes(wanted));
    this.holder.hidden = !rows.length;
    this.empty.hidden = rows.length > 0;
    text(this.count, `${found.length} of ${counted(rows.length, this.job.noun)}${found.length > MOST_SHOWN ? `, the last ${MOST_SHOWN} are shown` : ""}`);
    keepRows(this.body, found.slice(-MOST_SHOWN).reverse(), (each) => each.key, (each) => {
      const made = row(["sample", "verdict", "slot", "time", "done", "why"]);
      made.querySelector('[data-of="sample"]').append(el("button", { type: "button", class: "open-incident", on: { click: () => showIncident(each.event.id, each.incident) } }));
      return made;
    }, (shown, each) => {
      text(shown.querySelector("button"), each.sample);
      put(shown, "verdict", each.verdict);
      put(shown, "slot", String(each.slot));
      put(shown, "time", clock(each.time));
      put(shown, "done", each.done);
      put(shown, "why", each.why);
    });
  }
}

export class Incidents {
  constructor(job) {
    this.job = job;
    this.list = el("ol", { class: "incidents" });
    this.title = el("h3", {}, "What happened");
    this.node = el("section", {}, this.title, this.list);
  }

  update() {
    const all = this.job.of("incident", "epoch-began", "resized", "given-up", "job-ended");
    keepRows(this.list, all.slice(-60).reverse(), (event) => event.n, (event) => {
      const words = event.sentence ?? { "epoch-began": `epoch ${event.epoch} began`, resized: `another number of workers: ${event.why}`,
        "given-up": `gave up: ${event.why}`, "job-ended": "the job ended" }[event.kind];
      const shown = event.kind === "incident"
        ? el("button", { type: "button", class: "open-incident", on: { click: () => showIncident(event.id, event) } }, words) : el("span", {}, words);
      return el("li", { class: event.incident === "recycled" || event.kind !== "incident" ? "quiet" : "" }, el("time", {}, clock(event.time)), " ", shown);
    }, () => {});
  }
}
