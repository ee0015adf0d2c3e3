// A quiz: a button for each question says whether the chosen answer is right, and why.
// Nothing is kept or sent; without this script the folded answers can be read.
document.addEventListener("DOMContentLoaded", () => {
  for (const question of document.querySelectorAll(".quiz fieldset")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Check";
    const said = document.createElement("div");
    said.className = "quiz-said";
    said.setAttribute("role", "status"); // read aloud when it changes
    question.querySelector("details").before(button, said);

    const check = () => {
      const chosen = question.querySelector("input:checked");
      if (!chosen) {
        said.replaceChildren("Choose an answer first.");
        return;
      }
      const answer = question.querySelector(`li[data-option="${chosen.value}"]`);
      const right = answer.dataset.right === "true";
      const verdict = document.createElement("strong");
      verdict.textContent = right ? "Right. " : "Not right. ";
      said.dataset.right = right;
      said.replaceChildren(verdict, answer.querySelector(".quiz-why").cloneNode(true));
    };
    button.addEventListener("click", check);
    question.addEventListener("change", () => {
      said.replaceChildren();
      delete said.dataset.right;
    });
    question.addEventListener("keydown", (e) => {
      if (e.key !== "Enter" || e.target.type !== "radio") return;
      e.preventDefault();
      check();
    });
  }
});
