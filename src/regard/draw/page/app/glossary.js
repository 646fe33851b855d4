// What roles and measures mean, in words, for hovering and for screen readers.

const MEASURE_WORDS = {};
const ROLE_WORDS = {};
