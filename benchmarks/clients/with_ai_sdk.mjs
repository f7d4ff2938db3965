// The AI SDK: an agent with a tool, a structured answer, and a prompt that is too long. node with_ai_sdk.mjs URL CASE
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, stepCountIs, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const settings = { baseURL: `${url}/v1`, apiKey: "none" };
const models = {
  "chat completions": createOpenAICompatible({ name: "local", supportsStructuredOutputs: true, ...settings })("scripted"),
  responses: createOpenAI(settings)("scripted"),
};
const check = (holds) => {
  if (!holds) throw new Error("the answer is another one");
};
const cases = {
  async tools(model) {
    const getWeather = tool({
      description: "Weather",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => (city === "Paris" ? "18 degrees, clear" : "unknown"),
    });
    const prompt = "What is the weather in Paris right now?";
    const { text, steps } = await generateText({ model, prompt, tools: { get_weather: getWeather }, stopWhen: stepCountIs(5) });
    check(text.includes("18 degrees") && steps.length === 2);
  },
  async structured(model) {
    const schema = z.object({ setup: z.string(), punchline: z.string() });
    const { output } = await generateText({ model, prompt: "Tell me a joke about cats.", output: Output.object({ schema }) });
    check(output.setup.startsWith("Why"));
  },
  async overflow(model) {
    try {
      await generateText({ model, prompt: "word ".repeat(80000), maxRetries: 0 });
    } catch (error) {
      check(APICallError.isInstance(error) && error.statusCode === 400 && error.message.includes("maximum context length"));
      return;
    }
    throw new Error("no error");
  },
};
for (const model of Object.values(models)) await cases[name](model);
console.log("done");
