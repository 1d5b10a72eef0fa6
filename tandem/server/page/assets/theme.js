// Applies the chosen theme before the first paint; the default is the system's.
(() => {
  const chosen = localStorage.getItem("tandem.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
