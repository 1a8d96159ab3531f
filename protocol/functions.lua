#!lua name=foray
-- Foray's server-side functions (Redis >= 7.0). Each is atomic; those that the learner calls are fenced by its lease.
-- When Redis is full, functions that add to the streams fail as a whole, BEFORE the task is acknowledged: publish,
-- retry and issue. That is the back-pressure. All others carry 'allow-oom', for one of two reasons:
--   they free memory, or keep leases alive that lead to it: foray_ack, foray_reset, foray_renew, foray_release, foray_beat
--   they are needed to reach a checkpoint, and replace their earlier values (bounded): foray_acquire and foray_meta
--   (start), foray_target and foray_view (the step before a checkpoint), foray_register (engines that are not listed
--   get no requests), foray_report (otherwise processes look dead when Redis is full)

-- BADKEY names a key with unexpected content: of another type, not a number, or a stream whose ids are exhausted.
local function bad(key, why)
  return {err = 'BADKEY ' .. key .. ': ' .. why}
end

local function checked(reply, key)
  if type(reply) ~= 'table' or not reply.err then return reply end
  local about_key = string.find(reply.err, '^WRONGTYPE') or string.find(reply.err, 'exhausted')
  error(about_key and bad(key, reply.err) or reply)
end

-- Like redis.call, but errors caused by a key's content name the key.
local function call(command, ...)
  return checked(redis.pcall(command, ...), command == 'XINFO' and select(2, ...) or (...))
end

-- Returns the integer at `key`, 0 if the key is missing. Beyond 15 digits Lua's numbers are not exact.
local function number_at(key)
  local text = call('GET', key) or '0'
  if #text > 15 or not string.match(text, '^%d+$') then error(bad(key, 'it holds no count')) end
  return tonumber(text)
end

local function own(lease, epoch, token)
  return call('HGET', lease, 'epoch') == epoch and call('HGET', lease, 'token') == token
end

local FENCED = {err = 'FENCED this learner no longer holds the lease'}

local function lost(stream)
  return {err = 'NOSTREAM ' .. stream .. ' is gone: state lost'}
end

-- Returns the id below which every entry has been delivered and acknowledged.
local function floor_id(stream, group)
  local pending = call('XPENDING', stream, group)
  if pending[2] then return pending[2] end
  for _, g in ipairs(call('XINFO', 'GROUPS', stream)) do
    local d = {}
    for i = 1, #g, 2 do d[g[i]] = g[i + 1] end
    if d['name'] == group then
      local ms, sq = string.match(d['last-delivered-id'], '(%d+)-(%d+)')
      -- if Lua's numbers are not exact, keep the last delivered entry
      return ms .. '-' .. (#sq > 15 and sq or string.format('%.0f', tonumber(sq) + 1))
    end
  end
end

-- MINID at the acknowledged floor never removes unread or pending entries; MAXLEN would.
local function trim(stream, group)
  local id = floor_id(stream, group)
  if id then call('XTRIM', stream, 'MINID', '=', id) end
end

-- Deletes an acknowledged entry immediately, so that a straggler below it does not keep its memory in use. Also one that
-- is not pending: a Redis that lost its newest state has forgotten the delivery, and would deliver it again.
local function acknowledge(stream, group, id)
  local n = call('XACK', stream, group, id)
  redis.pcall('XDEL', stream, id) -- without permission (an older ACL file) the entry is trimmed later
  return n
end

local function exists(stream)
  return call('EXISTS', stream) == 1
end

-- lease, epoch, meta | token, checkpoint epoch, ttl ms, takeover ('1' or '0'), lineage id (or ''), token of a holder that
-- has ended. Without the last one or two, as from an older learner, they are not compared
--   -> {1, epoch}, {0, epoch, ttl left, holder}, or {2, lineage id} if this Redis holds another run
redis.register_function{function_name = 'foray_acquire', flags = {'allow-oom'}, callback = function(k, a)
  local lineage = k[3] and call('HGET', k[3], 'lineage_id')
  local mine = a[5] ~= '' and a[5]
  if lineage and mine and lineage ~= mine and a[4] ~= '1' then return {2, lineage} end
  local holder = call('HGET', k[1], 'token')
  if holder and holder ~= a[1] and holder ~= a[6] and a[4] ~= '1' then
    return {0, tonumber(call('HGET', k[1], 'epoch') or '0') or 0, call('PTTL', k[1]), holder}
  end
  local epoch = math.max(number_at(k[2]), tonumber(a[2])) + 1
  call('SET', k[2], epoch)
  call('DEL', k[1])
  -- ttl and since (seconds, on this clock) are for display: with the TTL left they show when the lease was renewed
  call('HSET', k[1], 'epoch', epoch, 'token', a[1], 'ttl', a[3], 'since', call('TIME')[1])
  call('PEXPIRE', k[1], a[3])
  if k[3] and mine then call('HSETNX', k[3], 'lineage_id', mine) end
  return {1, epoch}
end}

-- lease | epoch, token, ttl ms -> 1 held, 0 lost. PEXPIRE works at maxmemory, SET would not.
redis.register_function{function_name = 'foray_renew', flags = {'allow-oom'}, callback = function(k, a)
  if not own(k[1], a[1], a[2]) then return 0 end
  return call('PEXPIRE', k[1], a[3])
end}

-- lease | epoch, token -> 1 if it was held and is now free
redis.register_function{function_name = 'foray_release', flags = {'allow-oom'}, callback = function(k, a)
  if not own(k[1], a[1], a[2]) then return 0 end
  return call('DEL', k[1])
end}

local function replace(hash, a)
  call('DEL', hash)
  for i = 3, #a, 2 do call('HSET', hash, a[i], a[i + 1]) end
end

-- lease, meta | epoch, token, then pairs field, value: the new content of the hash -> 1
redis.register_function{function_name = 'foray_meta', flags = {'allow-oom'}, callback = function(k, a)
  if not own(k[1], a[1], a[2]) then return FENCED end
  replace(k[2], a)
  return 1
end}

-- lease, meta, tasks, traj, other keys... | epoch, token, then pairs as above -> 1
-- Replaces the run in this Redis by an empty one: data of another lineage is neither leased nor trained.
redis.register_function{function_name = 'foray_reset', flags = {'allow-oom'}, callback = function(k, a)
  if not own(k[1], a[1], a[2]) then return FENCED end
  for i = 3, #k do call('DEL', k[i]) end
  call('XGROUP', 'CREATE', k[3], 'rollout', '0', 'MKSTREAM')
  call('XGROUP', 'CREATE', k[4], 'learner', '0', 'MKSTREAM')
  replace(k[2], a)
  return 1
end}

-- lease, issued, tasks | epoch, token, floor (every seq up to here is settled), ceiling (no higher seq was ever issued:
-- ignore a count above it), then pairs seq, body -> highest issued
redis.register_function('foray_issue', function(k, a)
  if not own(k[1], a[1], a[2]) then return FENCED end
  if not exists(k[3]) then return lost(k[3]) end
  local issued = number_at(k[2])
  if issued > tonumber(a[4]) then issued = 0 end
  issued = math.max(issued, tonumber(a[3]))
  for i = 5, #a, 2 do
    local seq = tonumber(a[i])
    if seq > issued then
      call('XADD', k[3], 'NOMKSTREAM', '*', 'seq', a[i], 'b', a[i + 1])
      issued = seq
    end
  end
  call('SET', k[2], issued)
  trim(k[3], 'rollout')
  return issued
end)

-- lease, tasks | epoch, token, then pairs seq, body -> number of tasks
redis.register_function('foray_reissue', function(k, a)
  if not own(k[1], a[1], a[2]) then return FENCED end
  if not exists(k[2]) then return lost(k[2]) end
  for i = 3, #a, 2 do call('XADD', k[2], 'NOMKSTREAM', '*', 'seq', a[i], 'b', a[i + 1]) end
  return (#a - 2) / 2
end)

-- tasks | consumer, ids... -> the ids that this consumer still holds, with their idle time reset
redis.register_function{function_name = 'foray_beat', flags = {'allow-oom'}, callback = function(k, a)
  local mine = {}
  for i = 2, #a do
    local pending = call('XPENDING', k[1], 'rollout', a[i], a[i], 1, a[1])
    if #pending == 1 then
      call('XCLAIM', k[1], 'rollout', a[1], 0, a[i], 'JUSTID')
      mine[#mine + 1] = a[i]
    end
  end
  return mine
end}

-- tokens: a hash with counts of this Redis. Without key or number, as from an older rollout server, nothing is counted.
-- It is a statistic: if it cannot be written (wrong type, not a number, overflow), delivery continues.
local function count(key, field, n)
  if key and n and tonumber(n) > 0 then redis.pcall('HINCRBY', key, field, n) end
end

-- Returns whether `consumer` has leased the task `id`; nil: any consumer. Without the group none has.
local function leased(tasks, id, consumer)
  local pending = redis.pcall('XPENDING', tasks, 'rollout', id, id, 1, unpack({consumer}))
  if pending.err and string.find(pending.err, '^NOGROUP') then return false end
  return #checked(pending, tasks) == 1
end

-- tasks, traj, tokens | task id, seq, header, body, tokens sampled in this attempt [, consumer]
--   -> entry id, or DUP if this task has already been published
-- A finished group is accepted whoever has leased the task. A failure names its consumer and is accepted from the owner
-- of the lease only: another server may be about to finish the group.
-- Adds the entry before it acknowledges the task: after an error the task is still leased, and the caller retries.
redis.register_function('foray_publish', function(k, a)
  if not exists(k[2]) then return lost(k[2]) end
  if not leased(k[1], a[1], a[6]) then return 'DUP' end
  local id = call('XADD', k[2], 'NOMKSTREAM', '*', 'seq', a[2], 'h', a[3], 'b', a[4], 't', a[5] or '0')
  acknowledge(k[1], 'rollout', a[1])
  count(k[3], 'published', a[5])
  return id
end)

-- tasks, tokens | task id, seq, body of the next attempt, tokens sampled in the failed one [, consumer] -> new id, or DUP
-- Replaces the failed attempt by the next one, in the same order, if `consumer` owns its lease. Without a consumer, as
-- from an older rollout server, any lease is enough.
redis.register_function('foray_retry', function(k, a)
  if not leased(k[1], a[1], a[5]) then return 'DUP' end
  local id = call('XADD', k[1], 'NOMKSTREAM', '*', 'seq', a[2], 'b', a[3])
  acknowledge(k[1], 'rollout', a[1])
  count(k[2], 'rejected', a[4])
  return id
end)

-- lease, traj | epoch, token, ids... -> number of acknowledged entries
redis.register_function{function_name = 'foray_ack', flags = {'allow-oom'}, callback = function(k, a)
  if not own(k[1], a[1], a[2]) then return FENCED end
  local n = 0
  for i = 3, #a do n = n + acknowledge(k[2], 'learner', a[i]) end
  trim(k[2], 'learner')
  return n
end}

-- Wakes the nodes, which block on this stream. Without the key, as from an older learner, or if it has another type, they
-- look now and then.
local function wake(stream)
  if stream then redis.pcall('XADD', stream, 'MAXLEN', 8, '*', 'n', 1) end
end

-- lease, target [, wake] | epoch, token, body (a WeightUpdate), state ('ready' or 'done') -> 1
redis.register_function{function_name = 'foray_target', flags = {'allow-oom'}, callback = function(k, a)
  if not own(k[1], a[1], a[2]) then return FENCED end
  call('HSET', k[2], 'b', a[3], 'state', a[4])
  wake(k[3])
  return 1
end}

-- lease, view [, wake, plan] | epoch, token, body (a WeightView), ttl ms [, body (a WeightPlan)] -> 1
redis.register_function{function_name = 'foray_view', flags = {'allow-oom'}, callback = function(k, a)
  if not own(k[1], a[1], a[2]) then return FENCED end
  if a[5] then call('SET', k[4], a[5], 'PX', a[4]) end
  call('SET', k[2], a[3], 'PX', a[4])
  wake(k[3])
  return 1
end}

-- hash [, sorted set] | field, body, ttl ms [, score, member] -> 1. Writes a registration or an answer that expires.
redis.register_function{function_name = 'foray_register', flags = {'allow-oom'}, callback = function(k, a)
  call('HSET', k[1], a[1], a[2])
  call('PEXPIRE', k[1], a[3])
  if k[2] then call('ZADD', k[2], a[4], a[5]) end
  return 1
end}

-- metrics, processes | body, ttl ms, score, member -> 1
redis.register_function{function_name = 'foray_report', flags = {'allow-oom'}, callback = function(k, a)
  call('SET', k[1], a[1], 'PX', a[2])
  call('ZADD', k[2], a[3], a[4])
  return 1
end}

-- A census call reads entries up to this number of bytes, and the entry that exceeds it (at most 33 MiB): everybody else
-- waits meanwhile, and reading the whole stream would take seconds per gigabyte.
local PAGE_BYTES = 1048576
local ENTRY_BYTES = 512 -- counted for each entry besides its fields

-- Returns the field t of an entry, '0' without one, and its bytes.
local function tokens_and_bytes(entry)
  local t, bytes = '0', ENTRY_BYTES
  for i = 1, #entry[2], 2 do
    if entry[2][i] == 't' then t = entry[2][i + 1] end
    bytes = bytes + #entry[2][i + 1]
  end
  return t, bytes
end

-- traj, tokens -> {fields of the hash tokens, last id of traj, last id delivered to the learner}, atomically
redis.register_function{function_name = 'foray_census', flags = {'no-writes'}, callback = function(k)
  if not exists(k[1]) then return lost(k[1]) end
  local last, delivered = '0-0', '0-0'
  local info = call('XINFO', 'STREAM', k[1])
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then last = info[i + 1] end
  end
  for _, g in ipairs(call('XINFO', 'GROUPS', k[1])) do
    local d = {}
    for i = 1, #g, 2 do d[g[i]] = g[i + 1] end
    if d['name'] == 'learner' then delivered = d['last-delivered-id'] end
  end
  return {call('HGETALL', k[2]), last, delivered}
end}

-- traj | after, last -> {id, t, id, t, ...}: a page of the entries after `after`, up to `last`; empty: there are none
redis.register_function{function_name = 'foray_unread', flags = {'no-writes'}, callback = function(k, a)
  if not exists(k[1]) then return lost(k[1]) end
  local found, read, after = {}, 0, a[1]
  while read < PAGE_BYTES and after ~= a[2] do
    local entry = call('XRANGE', k[1], '(' .. after, a[2], 'COUNT', 1)[1]
    if not entry then break end
    local t, bytes = tokens_and_bytes(entry)
    after, read = entry[1], read + bytes
    found[#found + 1] = after
    found[#found + 1] = t
  end
  return found
end}

-- traj | ids... -> the field t of each existing entry, '0' for others: a page, for the first of the ids
redis.register_function{function_name = 'foray_tokens_of', flags = {'no-writes'}, callback = function(k, a)
  local found, read = {}, 0
  for i = 1, #a do
    if read >= PAGE_BYTES then break end
    found[i] = '0'
    local entry = call('XRANGE', k[1], a[i], a[i])[1]
    if entry then
      local t, bytes = tokens_and_bytes(entry)
      found[i], read = t, read + bytes
    end
  end
  return found
end}
