"use strict";
// What scrolls sideways on a phone can be reached with the keyboard. The theme wraps tables when the page is there.
document$.subscribe(() => setTimeout(() => {
  // The search is a dialog, which has to have a name.
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const code of document.querySelectorAll(".md-typeset pre > code")) code.tabIndex = 0;
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap")) {
    wrap.tabIndex = 0;
    wrap.setAttribute("role", "group");
    wrap.setAttribute("aria-label", "Table");
  }
}));
