// Light or dark, before anything is drawn: what was chosen here before, else what the system prefers.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("outlive-theme"); } catch { /* storage is turned off: the system's choice stays */ }
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
