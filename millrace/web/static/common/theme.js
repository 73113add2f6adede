// Sets the theme before the first paint. A classic script, because modules run after it.
"use strict";
try {
  const theme = localStorage.getItem("millrace.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* Storage is switched off: the system's preference applies. */ }
