"""The report of one incident as one HTML page that needs nothing else.

Reads   an entry of the journal.
Writes  nothing; the caller keeps the text.
Never   a script, a font, a picture or a style from elsewhere, and no text that is not escaped.
"""

from __future__ import annotations

from outlive._forensics import plot, report, words
from outlive._forensics.job import Job
from outlive._forensics.report import Section
from outlive.incident import Incident
from outlive.tables import escaped

_STYLE = """
:root { color-scheme: light dark; --ground: #fbfbfa; --card: #fff; --ink: #1c1f23; --faint: #626b76; --rule: #dfe2e6;
  --mark: #b3261e; --line: #1f5fbf; --soft: #1f5fbf22; --code: #f2f3f5; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171a; --card: #1b1f24; --ink: #e4e7eb; --faint: #98a2ae;
  --rule: #30363d; --mark: #ff8a80; --line: #79aefc; --soft: #79aefc26; --code: #22272e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 54rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.45rem; line-height: 1.3; margin: .2rem 0 .6rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0 0 .6rem; }
.when, footer { color: var(--faint); margin: 0; }
.verdict { display: inline-block; color: var(--mark); border: 1px solid currentColor; border-radius: 1rem;
  padding: 0 .7rem; font-weight: 600; font-size: .85rem; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: .5rem; padding: 1rem 1.25rem;
  margin-top: 1rem; }
dl { display: grid; grid-template-columns: 6.5rem 1fr; gap: .25rem 1rem; margin: 0; }
dt { color: var(--faint); } dd { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
pre { margin: 0; padding: .75rem; background: var(--code); border-radius: .35rem; overflow: auto; max-height: 32rem;
  font: 12.5px/1.45 ui-monospace, monospace; }
dl + pre { margin-top: .75rem; }
.plot { width: 100%; height: auto; display: block; }
.plot text { font: 11px system-ui, sans-serif; fill: var(--faint); }
.plot .grid { stroke: var(--rule); } .plot .area { fill: var(--soft); }
.plot .resident { fill: none; stroke: var(--line); stroke-width: 2; }
.plot .private { fill: none; stroke: var(--line); stroke-width: 1.5; stroke-dasharray: 2 4; }
.plot line.limit { stroke: var(--mark); stroke-width: 1.5; } .plot text.limit { fill: var(--mark); }
.plot line.peak { stroke: var(--faint); stroke-dasharray: 5 4; } .plot .end { fill: var(--mark); }
.legend { color: var(--faint); font-size: .8rem; margin: .25rem 0 .5rem; }
footer { margin-top: 1.5rem; font-size: .8rem; }
@media print { :root { color-scheme: light; --ground: #fff; --card: #fff; --ink: #000; --faint: #444; --rule: #bbb;
  --mark: #a00; --line: #124a9c; --soft: #124a9c18; --code: #f5f5f5; }
  main { max-width: none; padding: 0; } section { break-inside: avoid-page; }
  pre { max-height: none; overflow: visible; white-space: pre-wrap; overflow-wrap: anywhere; } }
"""


def of_incident(incident: Incident, job: Job | None, *, now: float, version: str) -> str:
    verdict = incident.verdict
    title = escaped(report.headline(incident))
    name = escaped(verdict.name if verdict else incident.kind)
    when = escaped(f"{words.local(incident.when)}, {words.ago(incident.when, now)}")
    body = [_section(report.summary(incident))]
    for section in report.sections(incident, job):
        body.append(_section(section, _picture(incident) if section.title.startswith("Memory") else ""))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<p class="when">incident {escaped(incident.id)} · {when}</p>
<h1>{title}</h1>
<span class="verdict">{name}</span>
{"".join(body)}
<footer>outlive {escaped(version)} · outlive report {escaped(incident.id)}</footer>
</main>
</body>
</html>
"""


def _section(section: Section, picture: str = "") -> str:
    shown = [(name, text) for name, text in section.rows if not (picture and name == "over time")]
    rows = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(text)}</dd>" for name, text in shown)
    listed = f"<dl>{rows}</dl>" if rows else ""
    text = f"<pre>{escaped(section.text)}</pre>" if section.text else ""
    return f"<section><h2>{escaped(section.title)}</h2>{picture}{listed}{text}</section>\n"


def _picture(incident: Incident) -> str:
    worked, around = incident.evidence.worked, incident.evidence.surroundings
    limits = []
    if around is not None and around.oom.group_limit_bytes is not None:
        limits.append(("limit of the cgroup", around.oom.group_limit_bytes))
    if around is not None and around.total_bytes is not None:
        limits.append(("memory of the machine", around.total_bytes))
    drawn = plot.memory(worked.memory, peak=worked.peak_resident_bytes, limits=limits)
    dotted = "; dotted: private to it" if any(s.private_bytes is not None for s in worked.memory) else ""
    return f'{drawn}<p class="legend">resident memory{dotted}</p>' if drawn else ""
