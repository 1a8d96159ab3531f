// An agent on Node: the `openai` package (plain or streamed), or Vercel's `ai` on the Responses API or on chat completions.
// `serve KIND MODE`: a service of such agents, which prints its port.
import { createServer } from "node:http";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, jsonSchema, stepCountIs, tool } from "ai";
import OpenAI from "openai";

const words = process.argv.slice(2);
const served = words[0] === "serve";
const [kind, mode] = served ? words.slice(1) : words;
const parameters = { type: "object", properties: { query: { type: "string" } }, required: ["query"] };

async function withOpenai({ question, base_url: baseURL, api_key: apiKey }) {
  const client = new OpenAI({ baseURL, apiKey });
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

async function withAi({ question, base_url: baseURL, api_key: apiKey }) {
  const openai = createOpenAI({ baseURL, apiKey });
  const search = tool({ description: "Search.", inputSchema: jsonSchema(parameters), execute: async () => "( a ) b c" });
  const model = mode === "chat" ? openai.chat("policy") : openai("policy");
  const { text } = await generateText({ model, prompt: question, tools: { search }, stopWhen: stepCountIs(5) });
  return text;
}

const play = async (task) => JSON.stringify({ answer: await (kind === "openai" ? withOpenai : withAi)(task) });

if (served) {
  const server = createServer(async (request, response) => {
    let text = "";
    for await (const piece of request) text += piece;
    response.end(await play(JSON.parse(text)));
  });
  server.listen(0, "127.0.0.1", () => console.log(server.address().port));
} else {
  const { FORAY_QUESTION: question, OPENAI_BASE_URL: base_url, OPENAI_API_KEY: api_key } = process.env;
  console.log(await play({ question, base_url, api_key }));
}
