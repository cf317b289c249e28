// The faults in the layout of this page that a person would see, as sentences.
() => {
  scrollTo(0, 0);
  const faults = new Set();
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) faults.add(`the page scrolls sideways: ${document.documentElement.scrollWidth} of ${width}`);

  // Contrast as WCAG 2 defines it: 4.5 is what its level AA asks for.
  const rgba = (color) => [...color.match(/[\d.]+/g).map(Number), 1].slice(0, 4);
  const over = (top, under) => [...[0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])), 1];
  const parents = (element) => (element ? [...parents(element.parentElement), element] : []);
  const ground = (element) => parents(element).reduce((under, one) => over(rgba(getComputedStyle(one).backgroundColor), under), [255, 255, 255, 1]);
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const luminance = (color) => [0.2126, 0.7152, 0.0722].reduce((sum, weight, i) => sum + weight * linear(color[i] / 255), 0);
  const contrast = (a, b) => {
    const [dark, light] = [luminance(a), luminance(b)].sort((p, q) => p - q);
    return (light + 0.05) / (dark + 0.05);
  };

  // A box of text is cut by the nearest element around it that scrolls or clips.
  const frame = (element) => parents(element).slice(2).reverse().find((one) => getComputedStyle(one).overflowX !== "visible");
  const boxes = [];
  const range = document.createRange();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    const words = texts.currentNode.data.trim().slice(0, 40);
    if (!words || ["SCRIPT", "STYLE"].includes(element.tagName) || !element.checkVisibility({ visibilityProperty: true })) continue;
    const style = getComputedStyle(element);
    const ink = rgba(element.closest("svg") ? style.fill : style.color);
    ink[3] *= parents(element).reduce((product, one) => product * getComputedStyle(one).opacity, 1);
    const ratio = contrast(over(ink, ground(element)), ground(element));
    if (ratio < 4.5) faults.add(`contrast ${ratio.toFixed(2)}: ${words}`);
    const inside = frame(element)?.getBoundingClientRect();
    range.selectNodeContents(texts.currentNode);
    for (const box of range.getClientRects()) {
      if (!inside && (box.left < -1 || box.right > width + 1)) faults.add(`outside the window: ${words}`);
      const [left, right] = inside ? [Math.max(box.left, inside.left), Math.min(box.right, inside.right)] : [box.left, box.right];
      if (right > left) boxes.push({ left, right, top: box.top, bottom: box.bottom, words });
    }
  }
  boxes.sort((a, b) => a.top - b.top);
  boxes.forEach((a, index) => {
    for (let other = index + 1; other < boxes.length && boxes[other].top < a.bottom - 3; other++) {
      const b = boxes[other];
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      if (across > 2 && Math.min(a.bottom, b.bottom) - b.top > 3) faults.add(`"${a.words}" and "${b.words}" overlap`);
    }
  });

  // 24 pixels are what WCAG 2.2 asks of a target; a column that is squeezed breaks its words at every letter.
  for (const target of document.querySelectorAll("button, input, summary")) {
    const box = target.getBoundingClientRect();
    if (target.checkVisibility() && Math.min(box.width, box.height) < 24) faults.add(`hard to hit: ${target.innerText}`);
  }
  for (const cell of document.querySelectorAll("td, th")) {
    const box = cell.getBoundingClientRect();
    if (cell.checkVisibility() && cell.innerText.length > 5 && box.width < 40) faults.add(`squeezed: ${cell.innerText}`);
  }
  return [...faults];
};
