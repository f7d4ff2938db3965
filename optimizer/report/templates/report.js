// The report page: switches the theme, and shows rows and details on demand.
"use strict";
(function () {
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const say = () => { theme.textContent = dark() ? "Light" : "Dark"; };
  theme.hidden = false;
  theme.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; say(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", say);
  say();

  for (const button of document.querySelectorAll("button[aria-controls]")) {
    const target = document.getElementById(button.getAttribute("aria-controls"));
    const show = (open) => {
      button.setAttribute("aria-expanded", String(open));
      button.textContent = open ? "−" : "+";
      target.hidden = !open;
    };
    button.hidden = false;
    show(false);
    button.addEventListener("click", () => show(target.hidden));
  }

  const idle = document.getElementById("idle");
  if (idle) {
    const rows = document.querySelectorAll("tr.idle");
    const show = (open) => {
      for (const row of rows) row.hidden = !open;
      idle.setAttribute("aria-pressed", String(open));
      idle.textContent = open ? "Hide those that changed nothing" : "Show " + rows.length + " that changed nothing";
    };
    idle.hidden = false;
    show(false);
    idle.addEventListener("click", () => show(idle.getAttribute("aria-pressed") !== "true"));
  }
})();
