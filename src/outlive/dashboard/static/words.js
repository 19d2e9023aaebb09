// Figures as people read them.

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "—";
  for (const unit of ["B", "KiB", "MiB", "GiB", "TiB"]) {
    if (Math.abs(bytes) < 1024 || unit === "TiB") return `${bytes >= 100 || unit === "B" ? Math.round(bytes) : bytes.toPrecision(3)} ${unit}`;
    bytes /= 1024;
  }
}

export function seconds(count) {
  if (count < 1) return `${Math.round(count * 1000)} ms`;
  if (count < 100) return `${Number(count.toPrecision(3))} s`;
  const minutes = Math.floor(count / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(count % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function ago(time, now) {
  const passed = Math.max(0, now - time);
  if (passed < 3) return "just now";
  if (passed < 90) return `${Math.round(passed)} s ago`;
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  if (passed < 129600) return `${Math.round(passed / 3600)} h ago`;
  return `${Math.round(passed / 86400)} days ago`;
}

export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

export function day(time) {
  return new Date(time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium", hour12: false });
}

export function rate(value) {
  return value >= 100 ? String(Math.round(value)) : String(Number(value.toPrecision(3)));
}

export function percent(share) {
  return `${Math.round(share * 100)} %`;
}

export function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}
