// What a reader opens or moves. Nothing is loaded before.

for (const link of document.querySelectorAll(".island a")) {
  link.addEventListener("click", (event) => {
    if (link.target || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    link.target = "_blank"; // from now on it opens a page of its own
    const frame = document.createElement("iframe");
    frame.title = link.textContent;
    frame.src = link.href;
    link.parentElement.after(frame);
    frame.focus();
  });
}

for (const figure of document.querySelectorAll("figure.compare")) {
  const slider = figure.querySelector("input");
  slider.addEventListener("input", () => figure.style.setProperty("--at", `${slider.value}%`));
}

for (const figure of document.querySelectorAll("figure.film")) {
  const [slider, caption] = [figure.querySelector("input"), figure.querySelector("figcaption")];
  const frames = JSON.parse(figure.querySelector("script").textContent);
  const show = () => {
    const [text, pictures] = frames[slider.value];
    caption.textContent = text;
    slider.setAttribute("aria-valuetext", text);
    figure.querySelectorAll("img").forEach((image, at) => (image.src = pictures[at]));
  };
  slider.addEventListener("input", show);
  show();
}

// What scrolls sideways on this screen can be reached by the keyboard; what does not is no stop of the tab key.
const scrolling = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
for (const box of document.querySelectorAll(".math, .table-wrapper, .cell_output")) scrolling.observe(box);
