// The dialog: one incident with everything that is known of it, or what a worker answered.

import { el, fill, text } from "./dom.js";
import { day } from "./words.js";

const dialog = document.getElementById("dialog");
const title = document.getElementById("dialog-title");
const body = document.getElementById("dialog-body");
let asked = 0; // the newest question; answers to older ones come too late
let opener = null;

document.getElementById("dialog-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
dialog.addEventListener("close", () => { asked += 1; if (opener?.isConnected) opener.focus(); });

function open(words) {
  asked += 1;
  opener = document.activeElement;
  text(title, words);
  fill(body, el("p", { class: "faint" }, "…"));
  if (!dialog.open) dialog.showModal();
  body.scrollTop = 0;
  return asked;
}

async function answerOf(response) {
  const told = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(told.error ?? `the server answered ${response.status}`);
  return told;
}

export async function showIncident(id, known = null) {
  const mine = open(known?.sentence ?? `Incident ${id}`);
  for (let tries = 0; ; tries += 1) {
    try {
      const told = await answerOf(await fetch(`/api/incidents/${encodeURIComponent(id)}`));
      if (mine === asked) show(told);
      return;
    } catch (error) {
      if (mine !== asked) return;
      if (tries >= 6) { fill(body, rowsOf(known), el("p", { class: "bad" }, String(error.message))); return; }
      await new Promise((done) => setTimeout(done, 500)); // the journal is written a moment after the incident
    }
  }
}

function rowsOf(known) {
  if (!known) return null;
  return list([["cause", known.cause], ["verdict", known.verdict], ["samples", (known.samples ?? []).join(", ")], ["done", known.action]]);
}

function list(rows) {
  return el("dl", {}, rows.filter(([, words]) => words).map(([name, words]) => [el("dt", {}, name), el("dd", {}, words)]));
}

function show(told) {
  text(title, told.headline);
  const base = `/api/incidents/${encodeURIComponent(told.id)}`;
  fill(body,
    el("p", { class: "faint" }, `incident ${told.id} · ${day(told.time)}`),
    el("p", {}, el("span", { class: "verdict" }, told.verdict), told.confidence ? ` ${told.confidence}` : ""),
    el("p", { class: "downloads" }, el("a", { href: `${base}.html`, download: true }, "download as HTML"), " ",
      el("a", { href: `${base}.json`, download: true }, "download as JSON")),
    told.sections.map((section) => el("section", {}, el("h3", {}, section.title),
      section.rows.length ? list(section.rows) : null,
      section.text ? el("pre", { tabindex: "0" }, section.text) : null)));
}

export async function askSlot(job, slot, what) {
  const words = what === "stacks" ? `Stacks of worker ${slot}` : `A fresh worker for slot ${slot}`;
  const mine = open(words);
  try {
    const url = `/api/jobs/${encodeURIComponent(job.key)}/slots/${slot}/${what}`;
    const told = await answerOf(await fetch(url, { method: "POST", headers: { "X-Outlive": "1" } }));
    if (mine === asked) fill(body, what === "stacks" ? el("pre", { tabindex: "0" }, told.answer) : el("p", {}, told.answer));
  } catch (error) {
    if (mine === asked) fill(body, el("p", { class: "bad" }, String(error.message)));
  }
}
