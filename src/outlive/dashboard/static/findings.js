// What is wrong, in words: which sample, which worker, since when, what it cost, what to change.

import { el, keepRows, text } from "./dom.js";
import { showIncident } from "./incident.js";
import { ago, clock, seconds } from "./words.js";

const MARKS = { bad: "✕", warn: "!", note: "i", good: "✓" };
const LEVELS = { bad: "serious", warn: "costs time", note: "good to know", good: "all well" };
const FROM_THE_BEGINNING_S = 4; // figures come once a second, and some are over five of them
const ROWS = [["why", "why"], ["which sample", "which"], ["which worker", "who"], ["since when", "since"], ["what it cost", "cost"], ["what to change", "change"]];

export class Findings {
  constructor(job, announce) {
    this.job = job;
    this.announce = announce;
    this.titles = new Set();
    this.list = el("ol", { class: "findings" });
    this.heading = el("h3");
    this.node = el("section", { class: "found" }, this.heading, this.list);
  }

  update(now) {
    const { findings } = this.job;
    text(this.heading, this.job.alive ? "What is going on" : "What was going on");
    for (const finding of findings) finding.key = `${finding.kind} ${finding.incidents[0] ?? ""}`; // two may be of one kind
    keepRows(this.list, findings, (finding) => finding.key, () => this.make(), (node, finding) => this.show(node, finding, now));
    const titles = new Set(findings.map((finding) => finding.key));
    const fresh = findings.filter((finding) => !this.titles.has(finding.key) && finding.level !== "good");
    if (fresh.length) this.announce(`${this.job.about.name}: ${fresh.map((finding) => finding.title).join(". ")}`);
    this.titles = titles;
  }

  make() {
    return el("li", {}, el("h4", {}, el("span", { class: "level", "aria-hidden": "true" }), el("span", { class: "unseen" }), el("span", { class: "title" })),
      el("dl", {}, ROWS.map(([name, key]) => [el("dt", { "data-of": key }, name), el("dd", { "data-of": key })])),
      el("p", { class: "more" }));
  }

  show(node, finding, now) {
    node.className = finding.level;
    node.dataset.kind = finding.kind;
    text(node.querySelector(".level"), MARKS[finding.level] ?? "i");
    text(node.querySelector("h4 .unseen"), `${LEVELS[finding.level] ?? ""}: `);
    text(node.querySelector(".title"), finding.title);
    const values = { ...finding, change: null,
      since: finding.since ? `${clock(finding.since)}, ${ago(finding.since, now)}: ${this.into(finding)}` : "the beginning" };
    for (const cell of node.querySelectorAll("dd")) {
      const key = cell.dataset.of;
      if (key === "change") this.changes(cell, finding.change);
      else text(cell, values[key] || "");
      const hidden = key !== "change" && !values[key];
      cell.hidden = hidden;
      cell.previousElementSibling.hidden = hidden;
    }
    const more = node.querySelector(".more");
    const last = finding.incidents.at(-1) ?? "";
    if (more.dataset.id !== last) {
      more.dataset.id = last;
      more.replaceChildren(...(last ? [el("button", { type: "button", class: "open-incident", on: { click: () => showIncident(last) } },
        "stacks and details")] : []));
    }
  }

  // How far into the run that was, and in which batch: logs of a training have these.
  into(finding) {
    const passed = finding.since - this.job.about.began;
    const when = `${seconds(Math.max(0, passed))} after it began`;
    if (finding.at) return `${when}, in ${finding.at}`;
    return passed < FROM_THE_BEGINNING_S ? "from the beginning" : when;
  }

  changes(cell, changes) {
    const told = changes.join("\n");
    if (cell.dataset.told === told) return;
    cell.dataset.told = told;
    cell.replaceChildren(el("ul", {}, changes.map((each) => el("li", {}, each))));
  }
}
