{{/*
What the chart knows of the program: its commands, paths, variables, ports and settings. Nothing of this is written
anywhere else in the chart.
*/}}

{{/* Settings that the program has. One that it opens by itself must be turned off by null where it is not wanted. */}}
{{- define "outrider.hasHttpPort" -}}true{{- end }}
{{- define "outrider.hasMetricsPort" -}}true{{- end }}

{{- define "outrider.settingsFolder" -}}/etc/outrider{{- end }}
{{- define "outrider.tlsFolder" -}}/etc/outrider-tls{{- end }}
{{- define "outrider.apiKeyFolder" -}}/etc/outrider-api-keys{{- end }}
{{- define "outrider.stateFolder" -}}/var/lib/outrider{{- end }}
{{- define "outrider.settingsFile" -}}{{ include "outrider.settingsFolder" . }}/outrider.yaml{{- end }}

{{/* Ports of Ray that are not the program's choice. */}}
{{- define "outrider.rayNodeManagerPort" -}}6380{{- end }}
{{- define "outrider.rayObjectManagerPort" -}}6381{{- end }}
{{- define "outrider.rayHeadAddress" -}}127.0.0.1:{{ .Values.rayCluster.head.gcsPort }}{{- end }}

{{- define "outrider.routerArgs" -}}
- router
- --file={{ include "outrider.settingsFile" . }}
- --grace={{ .Values.routerSpec.drainSeconds }}
- --log-level={{ .Values.logLevel }}
{{- end }}

{{- define "outrider.supervisorArgs" -}}
- supervise
- --file={{ include "outrider.settingsFile" . }}
- --room-timeout={{ .Values.rayCluster.roomTimeoutSeconds }}
{{- end }}

{{- define "outrider.testArgs" -}}
- generate
- --address=$(OUTRIDER_ADDRESS)
- {{ printf "--prompt=%s" .Values.test.prompt | quote }}
- --max-tokens=16
- --json
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
{{- end }}

{{/* The variable that the settings take the password of Redis from. */}}
{{- define "outrider.redisEnv" -}}
{{- if include "outrider.redisHasPassword" . }}
- name: OUTRIDER_REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ include "outrider.redisSecretName" . }}
      key: password
{{- end }}
{{- end }}

{{- define "outrider.redisUrl" -}}
{{- $login := "" }}
{{- if include "outrider.redisHasPassword" . }}
{{- $user := ternary "" .Values.redis.external.username .Values.redis.enabled }}
{{- $login = printf "%s:${OUTRIDER_REDIS_PASSWORD}@" $user }}
{{- end }}
{{- $database := ternary 0 (int .Values.redis.external.database) .Values.redis.enabled }}
{{- printf "redis://%s%s/%d" $login (include "outrider.redisAddress" .) $database }}
{{- end }}

{{/* The keys of an engine that have the same names here, but for their case. */}}
{{- define "outrider.engine" -}}
{{- $settings := dict "model" .model }}
{{- range list "dtype" "device" "quantization" "quantizationGroupSize" "kvCacheDtype" "maxModelLen" "blockSize" "numKvBlocks" "maxNumBatchedTokens" "maxNumSeqs" "numThreads" }}
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
{{- $_ := set $settings "redis" (dict "url" (include "outrider.redisUrl" .)) }}
{{- $_ := set $settings "ray" (dict "address" (include "outrider.rayHeadAddress" .)) }}
{{- $_ := set $settings "target" (include "outrider.targetSettings" . | fromYaml) }}
{{- $_ := set $settings "drafts" $drafts }}
{{- toYaml $settings }}
{{- end }}

{{- define "outrider.routerSettings" -}}
{{- $spec := .Values.routerSpec }}
{{- $router := dict "host" "0.0.0.0" "port" $spec.containerPort "max_queue" $spec.maxQueue }}
{{- $_ := set $router "enable_prefix_caching" $spec.enablePrefixCaching }}
{{- $_ := set $router "max_prefill_slowdown" $spec.maxPrefillSlowdown }}
{{- $_ := set $router "default_timeout_s" $spec.defaultTimeoutS }}
{{- with $spec.maxNumSeqs }}{{- $_ := set $router "max_num_seqs" . }}{{- end }}
{{- if $spec.http.enabled }}
{{- $_ := set $router "http_port" $spec.http.port }}
{{- with $spec.http.servedModelName }}{{- $_ := set $router "served_model_name" . }}{{- end }}
{{- if $spec.http.apiKey.secretName }}{{- $_ := set $router "api_key_file" (printf "%s/keys" (include "outrider.apiKeyFolder" .)) }}{{- end }}
{{- else if include "outrider.hasHttpPort" . }}{{- $_ := set $router "http_port" nil }}
{{- end }}
{{- if .Values.metrics.enabled }}{{- $_ := set $router "metrics_port" .Values.metrics.port }}
{{- else if include "outrider.hasMetricsPort" . }}{{- $_ := set $router "metrics_port" nil }}
{{- end }}
{{- if .Values.tls.enabled }}
{{- $folder := include "outrider.tlsFolder" . }}
{{- $_ := set $router "ssl_certfile" (printf "%s/tls.crt" $folder) }}
{{- $_ := set $router "ssl_keyfile" (printf "%s/tls.key" $folder) }}
{{- if .Values.tls.requireClientCertificate }}{{- $_ := set $router "ssl_ca_certs" (printf "%s/ca.crt" $folder) }}{{- end }}
{{- end }}
{{- toYaml $router }}
{{- end }}

{{- define "outrider.settings" -}}
{{- $settings := include "outrider.sharedSettings" . | fromYaml }}
{{- $_ := set $settings "router" (include "outrider.routerSettings" . | fromYaml) }}
{{- $speculation := dict "num_speculative_tokens" .Values.speculation.numSpeculativeTokens "verifier" .Values.speculation.verifier }}
{{- with .Values.speculation.promptLookupMin }}{{- $_ := set $speculation "prompt_lookup_min" . }}{{- end }}
{{- with .Values.speculation.promptLookupMax }}{{- $_ := set $speculation "prompt_lookup_max" . }}{{- end }}
{{- $_ := set $settings "speculation" $speculation }}
{{- toYaml $settings }}
{{- end }}

{{/* Probes of a router, in which .service is a name in its health service. */}}
{{- define "outrider.routerProbe" -}}
grpc:
  port: {{ .root.Values.routerSpec.containerPort }}
  service: {{ .service | quote }}
{{- end }}
