// An agent of the AI SDK in a few lines: one turn of a conversation that a file keeps. node ai_sdk_agent.mjs PROMPT
import { execSync } from "node:child_process";
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";

const packages = createRequire(`${process.env.NODE_PATH}/`);
const { createOpenAI } = packages("@ai-sdk/openai");
const { generateText, stepCountIs, tool } = packages("ai");
const { z } = packages("zod");

const history = `${process.env.HOME}/messages.json`;
const messages = existsSync(history) ? JSON.parse(readFileSync(history, "utf8")) : [];
messages.push({ role: "user", content: process.argv[2] });
const model = createOpenAI({ baseURL: `${process.env.SERVED_URL}/v1`, apiKey: "none" })("scripted");
const tools = {
  run: tool({
    description: "Runs a command",
    inputSchema: z.object({ command: z.string() }),
    execute: async ({ command }) => execSync(command, { encoding: "utf8" }),
  }),
  look: tool({
    description: "Shows a picture",
    inputSchema: z.object({ path: z.string() }),
    execute: async ({ path }) => readFileSync(path).toString("base64"),
    toModelOutput: ({ output }) => ({ type: "content", value: [{ type: "media", data: output, mediaType: "image/png" }] }),
  }),
};
const { text, response } = await generateText({ model, messages, tools, stopWhen: stepCountIs(8) });
writeFileSync(history, JSON.stringify([...messages, ...response.messages]));
console.log(text);
