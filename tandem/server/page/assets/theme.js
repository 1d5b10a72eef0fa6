// Before anything is drawn: the theme that was chosen, or the system's.
(() => {
  const chosen = localStorage.getItem("tandem.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
