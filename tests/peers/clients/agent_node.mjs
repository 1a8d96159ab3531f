// An agent on Node: the `openai` package (plain or streamed), or Vercel's `ai` on the Responses API or on chat completions.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, stepCountIs, tool } from "ai";
import OpenAI from "openai";

const [kind, mode] = process.argv.slice(2);
const parameters = { type: "object", properties: { query: { type: "string" } }, required: ["query"] };
const question = process.env.FORAY_QUESTION;

async function withOpenai() {
  const client = new OpenAI();
  const messages = [{ role: "user", content: question }];
  const tools = [{ type: "function", function: { name: "search", parameters } }];
  for (;;) {
    const body = { model: "policy", messages, tools };
    const completion =
      mode === "stream"
        ? await client.chat.completions.stream(body).finalChatCompletion()
        : await client.chat.completions.create(body);
    const message = completion.choices[0].message;
    messages.push(message);
    if (!message.tool_calls?.length) return message.content;
    for (const call of message.tool_calls) messages.push({ role: "tool", tool_call_id: call.id, content: "( a ) b c" });
  }
}

async function withAi() {
  const openai = createOpenAI({ baseURL: process.env.OPENAI_BASE_URL });
  const search = tool({ description: "Search.", inputSchema: jsonSchema(parameters), execute: async () => "( a ) b c" });
  const model = mode === "chat" ? openai.chat("policy") : openai("policy");
  const { text } = await generateText({ model, prompt: question, tools: { search }, stopWhen: stepCountIs(5) });
  return text;
}

console.log(JSON.stringify({ answer: await (kind === "openai" ? withOpenai() : withAi()) }));
