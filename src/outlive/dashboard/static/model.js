// What the page knows of one job: the series that plots draw, and the events that tables list.

const MOST_TICKS = 3000;
const MOST_EVENTS = 2000;

const GROUPS = {
  fetching: "fetching", fetching_many: "fetching", at_work: "fetching", probing: "fetching", running: "fetching",
  collating: "collating", sending: "sending", delivering: "sending",
  idle: "waiting", waiting: "waiting", leaving: "waiting",
  starting: "starting", preparing: "starting", forwarding: "starting",
};

export function groupOf(stage) {
  return GROUPS[stage] ?? "waiting";
}

export class Job {
  constructor(told) {
    this.key = told.key;
    this.ticks = [];
    this.events = []; // all but ticks
    this.looks = []; // {time, slots}: what each worker did, seen from outside about once a second
    this.last = 0; // number of the last event
    this.version = 0; // changes with each tick and each event
    this.take(told);
  }

  take(told) {
    this.about = told;
    this.snapshot = told.snapshot ?? {};
    this.findings = told.findings ?? [];
    if (told.looks) this.looks = told.looks.map(([time, slots]) => ({ time, slots }));
    if (this.snapshot.alive && this.snapshot.time > (this.looks.at(-1)?.time ?? 0)) {
      const slots = this.snapshot.slots.filter((slot) => slot.pid).map((slot) => ({ slot: slot.slot, doing: slot.stage }));
      this.looks.push({ time: this.snapshot.time, slots });
    }
    if (this.looks.length > MOST_TICKS) this.looks.splice(0, this.looks.length - MOST_TICKS);
    for (const event of told.events ?? []) {
      if (event.n <= this.last) continue;
      this.last = event.n;
      this.version += 1;
      (event.kind === "tick" ? this.ticks : this.events).push(event);
    }
    if (this.ticks.length > MOST_TICKS) this.ticks.splice(0, this.ticks.length - MOST_TICKS);
    if (this.events.length > MOST_EVENTS) this.events.splice(0, this.events.length - MOST_EVENTS);
  }

  get noun() { return this.about.kind === "pool" ? "task" : "sample"; }
  get alive() { return Boolean(this.snapshot.alive); }

  of(...kinds) { return this.events.filter((event) => kinds.includes(event.kind)); }

  // [times, samples a second, share of waiting in %]
  pace() {
    const times = [], rates = [], waits = [];
    const counted = this.ticks.some((tick) => tick.samples) ? "samples" : "delivered";
    for (let n = 1; n < this.ticks.length; n += 1) {
      const [before, tick] = [this.ticks[n - 1], this.ticks[n]];
      const passed = tick.time - before.time;
      if (passed <= 0) continue;
      const wait = tick.wait_seconds - before.wait_seconds;
      const own = tick.trainer_seconds - before.trainer_seconds;
      times.push(tick.time);
      rates.push(Math.max(0, tick[counted] - before[counted]) / passed);
      waits.push(wait + own > 0 ? Math.min(100, Math.max(0, (100 * wait) / (wait + own))) : null);
    }
    return [times, rates, waits];
  }

  slotNumbers() {
    const found = new Set();
    for (const tick of this.ticks) for (const slot of tick.slots) found.add(slot.slot);
    for (const slot of this.snapshot.slots ?? []) if (slot.incarnation > 0) found.add(slot.slot);
    return [...found].sort((a, b) => a - b);
  }

  // [times, bytes of each slot …]
  memory(slots) {
    const times = [], rows = slots.map(() => []);
    for (const tick of this.ticks) {
      const by = new Map(tick.slots.map((slot) => [slot.slot, slot]));
      times.push(tick.time);
      slots.forEach((number, place) => rows[place].push(by.get(number)?.private ?? null));
    }
    return [times, ...rows];
  }

  // Where a worker died or was recycled: {time, slot, died, bytes}
  ends() {
    return this.of("worker-died", "worker-recycled").map((event) => {
      let bytes = null;
      for (let n = this.ticks.length - 1; n >= 0; n -= 1) {
        if (this.ticks[n].time > event.time + 0.05) continue;
        const slot = this.ticks[n].slots.find((each) => each.slot === event.slot && each.private);
        if (slot) { bytes = slot.private; break; }
        if (event.time - this.ticks[n].time > 5) break;
      }
      return { time: event.time, slot: event.slot, died: event.kind === "worker-died", bytes };
    });
  }

  // slot → stretches {from, to, what}, what a worker did when
  stretches() {
    const rows = new Map(this.slotNumbers().map((number) => [number, []]));
    let before = null;
    // Ticks are what the job wrote before anybody looked; it writes when a batch arrives, and may miss what lies between.
    const first = this.looks[0]?.time ?? Infinity;
    for (const tick of [...this.ticks.filter((each) => each.time < first), ...this.looks]) {
      const from = before === null || tick.time - before > 5 ? tick.time - 1 : before;
      for (const slot of tick.slots) {
        const row = rows.get(slot.slot);
        if (!row) continue;
        const what = groupOf(slot.doing);
        const last = row.at(-1);
        if (last && last.what === what && last.to >= from - 0.01) last.to = tick.time;
        else row.push({ from, to: tick.time, what });
      }
      before = tick.time;
    }
    const away = new Map();
    const end = this.snapshot.time ?? before;
    for (const event of this.of("worker-died", "worker-recycled", "worker-ready")) {
      if (event.kind === "worker-ready") {
        const gone = away.get(event.slot);
        if (gone) { rows.get(event.slot)?.push({ from: gone.from, to: Math.max(event.time, gone.from), what: gone.what }); away.delete(event.slot); }
      } else if (!away.has(event.slot)) {
        away.set(event.slot, { from: event.time, what: event.kind === "worker-died" ? "dead" : "recycled" });
      }
    }
    if (this.alive) for (const [slot, gone] of away) rows.get(slot)?.push({ from: gone.from, to: end, what: gone.what });
    return rows;
  }
}
