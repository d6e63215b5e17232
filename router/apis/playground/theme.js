// Light or dark: what the system says, unless a choice was made here. Runs before the page is drawn, so nothing flashes.
"use strict";

(() => {
  const CHOICES = ["system", "light", "dark"];
  const root = document.documentElement;

  function stored() {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null; // a browser that keeps nothing
    }
  }

  function apply(choice) {
    root.dataset.theme = CHOICES.includes(choice) ? choice : "system";
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = { system: "◐ Auto", light: "◐ Light", dark: "◐ Dark" }[root.dataset.theme];
      button.setAttribute("aria-label", `Colours: ${root.dataset.theme}. Change them`);
    }
  }

  apply(stored());
  document.addEventListener("DOMContentLoaded", () => {
    apply(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      const next = CHOICES[(CHOICES.indexOf(root.dataset.theme) + 1) % CHOICES.length];
      apply(next);
      try {
        localStorage.setItem("theme", next);
      } catch {
        // it holds until the page is left
      }
    });
  });
})();
