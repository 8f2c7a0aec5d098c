{{/*
What the chart knows of the program: its commands, paths, variables, ports and settings. Nothing of this is written
anywhere else in the chart.
*/}}

{{- define "outrider.settingsFolder" -}}/etc/outrider{{- end }}
{{- define "outrider.tlsFolder" -}}/etc/outrider-tls{{- end }}
{{- define "outrider.clientCertificateFolder" -}}/etc/outrider-client-tls{{- end }}
{{- define "outrider.apiKeyFolder" -}}/etc/outrider-api-keys{{- end }}
{{- define "outrider.redisFolder" -}}/etc/outrider-redis{{- end }}
{{- define "outrider.redisCaFolder" -}}/etc/outrider-redis-ca{{- end }}
{{- define "outrider.stateFolder" -}}/var/lib/outrider{{- end }}
{{- define "outrider.settingsFile" -}}{{ include "outrider.settingsFolder" . }}/outrider.yaml{{- end }}

{{/* Ports of Ray that are not the program's choice. */}}
{{- define "outrider.rayNodeManagerPort" -}}6380{{- end }}
{{- define "outrider.rayObjectManagerPort" -}}6381{{- end }}
{{/* And those that its head opens by itself: metrics, and clients of Ray. */}}
{{- define "outrider.rayOwnPorts" -}}
- {{ include "outrider.rayNodeManagerPort" . | quote }}
- {{ include "outrider.rayObjectManagerPort" . | quote }}
- "8080"
- "10001"
{{- end }}
{{- define "outrider.rayHeadAddress" -}}127.0.0.1:{{ .Values.rayCluster.head.gcsPort }}{{- end }}

{{- define "outrider.routerArgs" -}}
- router
- --file={{ include "outrider.settingsFile" . }}
- --grace={{ .Values.routerSpec.drainSeconds }}
{{- end }}

{{- define "outrider.supervisorArgs" -}}
- supervise
- --file={{ include "outrider.settingsFile" . }}
- --room-timeout={{ .Values.rayCluster.roomTimeoutSeconds }}
{{- end }}

{{/* `helm test`: a shell takes the first key out of the file, since the program wants the key itself. */}}
{{- define "outrider.testCommand" -}}
command: [sh, -euc]
args:
  - |
    {{- if .Values.routerSpec.apiKey.existingSecret }}
    OUTRIDER_API_KEY="$(grep -m1 '^[^#[:space:]]' {{ include "outrider.apiKeyFolder" . }}/keys)"
    export OUTRIDER_API_KEY
    {{- end }}
    exec outrider generate --address="$OUTRIDER_ADDRESS" --prompt="$OUTRIDER_TEST_PROMPT" --max-tokens=16 --temperature=0 --ignore-eos --json
{{- end }}

{{/* Variables of every container that runs the program. */}}
{{- define "outrider.env" -}}
- name: HOME
  value: /tmp
- name: OUTRIDER_STATE_DIR
  value: {{ include "outrider.stateFolder" . }}
- name: TORCH_EXTENSIONS_DIR
  value: /tmp/torch-extensions
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: HF_HUB_OFFLINE
  value: "1"
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Without the password, which is a file. */}}
{{- define "outrider.redisSettings" -}}
{{- $external := .Values.redis.external }}
{{- $scheme := ternary "rediss" "redis" (eq (include "outrider.redisHasTls" .) "true") }}
{{- $database := ternary 0 (int $external.database) .Values.redis.enabled }}
url: {{ printf "%s://%s/%d" $scheme (include "outrider.redisAddress" .) $database }}
{{- if include "outrider.redisHasPassword" . }}
password_file: {{ include "outrider.redisFolder" . }}/password
{{- if and (not .Values.redis.enabled) $external.username }}
username: {{ $external.username | quote }}
{{- end }}
{{- end }}
{{- if include "outrider.redisCaSecretName" . }}
ca_certs: {{ include "outrider.redisCaFolder" . }}/ca.crt
{{- end }}
{{- end }}

{{/* The keys of an engine that have the same names here, but for their case. */}}
{{- define "outrider.engine" -}}
{{- $settings := dict "model" .model }}
{{- range list "dtype" "activationDtype" "device" "quantization" "quantizationGroupSize" "kvCacheDtype" "maxModelLen" "blockSize" "numKvBlocks" "maxNumBatchedTokens" "maxNumSeqs" "numThreads" }}
{{- $value := get $ . }}
{{- if and (hasKey $ .) (not (kindIs "invalid" $value)) }}
{{- $_ := set $settings (snakecase .) $value }}
{{- end }}
{{- end }}
{{- toYaml $settings }}
{{- end }}

{{- define "outrider.targetSettings" -}}
{{- $target := include "outrider.engine" .Values.target | fromYaml }}
{{- $_ := set $target "tensor_parallel_size" .Values.target.tensorParallelSize }}
{{- $_ := set $target "placement_strategy" .Values.target.placementStrategy }}
{{- $_ := set $target "step_timeout_s" .Values.target.stepTimeoutS }}
{{- $_ := set $target "resources" (dict "target" 1) }}
{{- toYaml $target }}
{{- end }}

{{/* A pool that is not with rank 0 is bound to its own pods by a resource that only they have. */}}
{{- define "outrider.draftSettings" -}}
{{- $draft := include "outrider.engine" . | fromYaml }}
{{- $_ := set $draft "name" .name }}
{{- $_ := set $draft "replicas" .replicas }}
{{- $_ := set $draft "top_m" .topM }}
{{- $_ := set $draft "max_num_tokens" .maxNumTokens }}
{{- if eq .placement "sameNode" }}
{{- $_ := set $draft "placement" "sameNode" }}
{{- else }}
{{- $_ := set $draft "placement" "remote" }}
{{- $_ := set $draft "resources" (dict (printf "draft-%s" .name) 1) }}
{{- end }}
{{- toYaml $draft }}
{{- end }}

{{/* What target and drafts are made from: a change of it, and no other, is a new RayCluster. */}}
{{- define "outrider.sharedSettings" -}}
{{- $drafts := list }}
{{- range (include "outrider.drafts" . | fromYamlArray) }}
{{- $drafts = append $drafts (include "outrider.draftSettings" . | fromYaml) }}
{{- end }}
{{- $settings := dict "cluster" .Values.clusterName }}
{{- $_ := set $settings "redis" (include "outrider.redisSettings" . | fromYaml) }}
{{- $_ := set $settings "ray" (dict "address" (include "outrider.rayHeadAddress" .)) }}
{{- $_ := set $settings "target" (include "outrider.targetSettings" . | fromYaml) }}
{{- $_ := set $settings "drafts" $drafts }}
{{- toYaml $settings }}
{{- end }}

{{- define "outrider.routerSettings" -}}
{{- $spec := .Values.routerSpec }}
{{- $router := dict "host" "0.0.0.0" "port" $spec.containerPort "group_port" $spec.groupPort "metrics_port" .Values.metrics.port }}
{{- $_ := set $router "max_queue" $spec.maxQueue }}
{{- $_ := set $router "enable_prefix_caching" $spec.enablePrefixCaching }}
{{- $_ := set $router "max_prefill_slowdown" $spec.maxPrefillSlowdown }}
{{- $_ := set $router "default_timeout_s" $spec.defaultTimeoutS }}
{{- $_ := set $router "plan_ahead" $spec.planAhead }}
{{- $_ := set $router "tool_call_parser" $spec.http.toolCallParser }}
{{- $_ := set $router "per_request_spec_decode_metrics" $spec.http.perRequestSpecDecodeMetrics }}
{{- with $spec.maxNumSeqs }}{{- $_ := set $router "max_num_seqs" . }}{{- end }}
{{- /* The program would open this port by itself. */}}
{{- $_ := set $router "http_port" (ternary $spec.http.port nil $spec.http.enabled) }}
{{- with $spec.http.servedModelName }}{{- $_ := set $router "served_model_name" . }}{{- end }}
{{- if $spec.apiKey.existingSecret }}{{- $_ := set $router "api_key_file" (printf "%s/keys" (include "outrider.apiKeyFolder" .)) }}{{- end }}
{{- if .Values.tls.enabled }}
{{- $folder := include "outrider.tlsFolder" . }}
{{- $_ := set $router "ssl_certfile" (printf "%s/tls.crt" $folder) }}
{{- $_ := set $router "ssl_keyfile" (printf "%s/tls.key" $folder) }}
{{- if include "outrider.wantsClientCertificate" . }}{{- $_ := set $router "ssl_ca_certs" (printf "%s/ca.crt" $folder) }}{{- end }}
{{- end }}
{{- toYaml $router }}
{{- end }}

{{- define "outrider.settings" -}}
{{- $settings := include "outrider.sharedSettings" . | fromYaml }}
{{- $_ := set $settings "router" (include "outrider.routerSettings" . | fromYaml) }}
{{- $_ := set $settings "supervisor" (dict "metrics_port" .Values.metrics.port) }}
{{- $speculation := dict "num_speculative_tokens" .Values.speculation.numSpeculativeTokens "verifier" .Values.speculation.verifier }}
{{- with .Values.speculation.promptLookupMin }}{{- $_ := set $speculation "prompt_lookup_min" . }}{{- end }}
{{- with .Values.speculation.promptLookupMax }}{{- $_ := set $speculation "prompt_lookup_max" . }}{{- end }}
{{- $_ := set $settings "speculation" $speculation }}
{{- $_ := set $settings "logging" (dict "level" .Values.logging.level "format" .Values.logging.format) }}
{{- with .Values.tracing }}
{{- if .otlpEndpoint }}{{- $_ := set $settings "tracing" (dict "otlp_endpoint" .otlpEndpoint "sample_ratio" .sampleRatio) }}{{- end }}
{{- end }}
{{- toYaml $settings }}
{{- end }}

{{/* Probes of the program, over plain HTTP whatever clients speak: /livez, it answers; /readyz, it takes requests. */}}
{{- define "outrider.probe" -}}
httpGet:
  path: {{ .path }}
  port: {{ .port }}
{{- end }}
