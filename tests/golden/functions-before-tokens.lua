#!lua name=foray
-- Foray's server-side functions (Redis >= 7.0). Each is atomic; each that the learner calls is fenced by its lease.
-- Flags: acknowledging and renewing must work when Redis is full ('allow-oom'); publishing and issuing must not,
-- so that a full Redis is refused BEFORE the task is acknowledged and shows up as back-pressure.

local function own(lease, epoch, token)
  return redis.call('HGET', lease, 'epoch') == epoch and redis.call('HGET', lease, 'token') == token
end

local FENCED = {err = 'FENCED this learner no longer holds the lease'}

local function lost(stream)
  return {err = 'NOSTREAM ' .. stream .. ' is gone: state lost'}
end

-- Everything below this id has been delivered and acknowledged.
local function floor_id(stream, group)
  local pending = redis.call('XPENDING', stream, group)
  if pending[2] then return pending[2] end
  for _, g in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local d = {}
    for i = 1, #g, 2 do d[g[i]] = g[i + 1] end
    if d['name'] == group then
      local ms, sq = string.match(d['last-delivered-id'], '(%d+)-(%d+)')
      return ms .. '-' .. string.format('%.0f', tonumber(sq) + 1)
    end
  end
end

-- MINID at the acknowledged floor never removes what is unread or pending; MAXLEN would.
local function trim(stream, group)
  local id = floor_id(stream, group)
  if id then redis.call('XTRIM', stream, 'MINID', '=', id) end
end

local function exists(stream)
  return redis.call('EXISTS', stream) == 1
end

-- lease, epoch | token, checkpoint epoch, ttl ms, takeover ('1' or '0') -> {1, epoch} or {0, epoch, ttl left, holder}
redis.register_function('foray_acquire', function(k, a)
  local holder = redis.call('HGET', k[1], 'token')
  if holder and holder ~= a[1] and a[4] ~= '1' then
    return {0, tonumber(redis.call('HGET', k[1], 'epoch') or '0'), redis.call('PTTL', k[1]), holder}
  end
  local epoch = math.max(tonumber(redis.call('GET', k[2]) or '0'), tonumber(a[2])) + 1
  redis.call('SET', k[2], epoch)
  redis.call('DEL', k[1])
  redis.call('HSET', k[1], 'epoch', epoch, 'token', a[1])
  redis.call('PEXPIRE', k[1], a[3])
  return {1, epoch}
end)

-- lease | epoch, token, ttl ms -> 1 held, 0 lost. PEXPIRE works at maxmemory, SET would not.
redis.register_function{function_name = 'foray_renew', flags = {'allow-oom'}, callback = function(k, a)
  if not own(k[1], a[1], a[2]) then return 0 end
  return redis.call('PEXPIRE', k[1], a[3])
end}

-- lease | epoch, token -> 1 when it was held and is now free
redis.register_function{function_name = 'foray_release', flags = {'allow-oom'}, callback = function(k, a)
  if not own(k[1], a[1], a[2]) then return 0 end
  return redis.call('DEL', k[1])
end}

-- lease, issued, tasks | epoch, token, floor (every seq up to here is settled), then pairs seq, body -> highest issued
redis.register_function('foray_issue', function(k, a)
  if not own(k[1], a[1], a[2]) then return FENCED end
  if not exists(k[3]) then return lost(k[3]) end
  local issued = math.max(tonumber(redis.call('GET', k[2]) or '0'), tonumber(a[3]))
  for i = 4, #a, 2 do
    local seq = tonumber(a[i])
    if seq > issued then
      redis.call('XADD', k[3], 'NOMKSTREAM', '*', 'seq', a[i], 'b', a[i + 1])
      issued = seq
    end
  end
  redis.call('SET', k[2], issued)
  trim(k[3], 'rollout')
  return issued
end)

-- lease, tasks | epoch, token, then pairs seq, body -> how many
redis.register_function('foray_reissue', function(k, a)
  if not own(k[1], a[1], a[2]) then return FENCED end
  if not exists(k[2]) then return lost(k[2]) end
  for i = 3, #a, 2 do redis.call('XADD', k[2], 'NOMKSTREAM', '*', 'seq', a[i], 'b', a[i + 1]) end
  return (#a - 2) / 2
end)

-- tasks | consumer, ids... -> the ids that are still this consumer's, now with a fresh idle time
redis.register_function{function_name = 'foray_beat', flags = {'allow-oom'}, callback = function(k, a)
  local mine = {}
  for i = 2, #a do
    local pending = redis.call('XPENDING', k[1], 'rollout', a[i], a[i], 1, a[1])
    if #pending == 1 then
      redis.call('XCLAIM', k[1], 'rollout', a[1], 0, a[i], 'JUSTID')
      mine[#mine + 1] = a[i]
    end
  end
  return mine
end}

-- tasks, traj | task id, seq, header, body -> entry id, or DUP when somebody has published this task already
redis.register_function('foray_publish', function(k, a)
  if not exists(k[2]) then return lost(k[2]) end
  if redis.call('XACK', k[1], 'rollout', a[1]) == 0 then return 'DUP' end
  return redis.call('XADD', k[2], 'NOMKSTREAM', '*', 'seq', a[2], 'h', a[3], 'b', a[4])
end)

-- tasks | task id, seq, body of the next attempt -> new id, or DUP. The failed attempt gives way to the next one.
redis.register_function('foray_retry', function(k, a)
  if redis.call('XACK', k[1], 'rollout', a[1]) == 0 then return 'DUP' end
  return redis.call('XADD', k[1], 'NOMKSTREAM', '*', 'seq', a[2], 'b', a[3])
end)

-- lease, traj | epoch, token, ids... -> how many were acknowledged
redis.register_function{function_name = 'foray_ack', flags = {'allow-oom'}, callback = function(k, a)
  if not own(k[1], a[1], a[2]) then return FENCED end
  local n = 0
  for i = 3, #a do n = n + redis.call('XACK', k[2], 'learner', a[i]) end
  trim(k[2], 'learner')
  return n
end}

-- lease, target | epoch, token, body (a WeightUpdate), state ('ready' or 'done') -> 1
redis.register_function('foray_target', function(k, a)
  if not own(k[1], a[1], a[2]) then return FENCED end
  redis.call('HSET', k[2], 'b', a[3], 'state', a[4])
  return 1
end)

-- lease, view | epoch, token, body (a WeightView), ttl ms -> 1
redis.register_function('foray_view', function(k, a)
  if not own(k[1], a[1], a[2]) then return FENCED end
  redis.call('SET', k[2], a[3], 'PX', a[4])
  return 1
end)
