{{/* At most 40 characters: KubeRay and the parts add theirs. */}}
{{- define "outrider.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- default $full .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "outrider.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "outrider.selectorLabels" -}}
app.kubernetes.io/name: {{ include "outrider.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "outrider.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "outrider.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: outrider
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Without the chart's version: pods are not to be made anew for a new chart that changes nothing of theirs. */}}
{{- define "outrider.podLabels" -}}
{{ include "outrider.selectorLabels" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "outrider.serviceAccountName" -}}
{{- ternary (default (include "outrider.fullname" .) .Values.serviceAccount.name) (default "default" .Values.serviceAccount.name) .Values.serviceAccount.create }}
{{- end }}

{{- define "outrider.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}
{{- else }}{{ .repository }}:{{ default (printf "%s-%s" $.Chart.AppVersion .variant) .tag }}
{{- end }}
{{- end }}
{{- end }}

{{- define "outrider.redisSecretName" -}}
{{- default (printf "%s-redis" (include "outrider.fullname" .)) .Values.redis.auth.existingSecret }}
{{- end }}

{{- define "outrider.redisHasPassword" -}}
{{- if or .Values.redis.enabled .Values.redis.external.passwordRequired }}true{{- end }}
{{- end }}

{{- define "outrider.redisAddress" -}}
{{- if .Values.redis.enabled }}{{ include "outrider.fullname" . }}-redis:{{ .Values.redis.port }}
{{- else }}{{ required "redis.external.host is missing: redis.enabled is false" .Values.redis.external.host }}:{{ .Values.redis.port }}
{{- end }}
{{- end }}

{{/* Redis over TLS: `true` or nothing. */}}
{{- define "outrider.redisHasTls" -}}
{{- if and (not .Values.redis.enabled) .Values.redis.external.tls.enabled }}true{{- end }}
{{- end }}

{{- define "outrider.redisCaSecretName" -}}
{{- if include "outrider.redisHasTls" . }}{{ .Values.redis.external.tls.caSecretName }}{{- end }}
{{- end }}

{{/* `true` where the models' claim can be mounted on one node only, so that all pods must be there. */}}
{{- define "outrider.isBoundToOneNode" -}}
{{- with .Values.models }}
{{- if and (or .create .existingClaim) (not .volume) (not (has "ReadWriteMany" .accessModes)) (not (has "ReadOnlyMany" .accessModes)) }}true{{- end }}
{{- end }}
{{- end }}

{{- define "outrider.tlsSecretName" -}}
{{- default (printf "%s-tls" (include "outrider.fullname" .)) .Values.tls.existingSecret }}
{{- end }}

{{/* `true` where clients must show a certificate. */}}
{{- define "outrider.wantsClientCertificate" -}}
{{- if and .Values.tls.enabled .Values.tls.requireClientCertificate }}true{{- end }}
{{- end }}

{{/* Of `helm test` and of the notes' first request. */}}
{{- define "outrider.clientCertificateSecretName" -}}
{{- default (include "outrider.tlsSecretName" .) .Values.test.clientCertificateSecret }}
{{- end }}

{{- define "outrider.rayAuthSecretName" -}}
{{- default (include "outrider.fullname" .) .Values.rayCluster.auth.existingSecret }}
{{- end }}

{{/* The pools, each with its defaults, as a YAML list. */}}
{{- define "outrider.drafts" -}}
{{- $drafts := list }}
{{- range .Values.drafts }}
{{- $draft := mergeOverwrite (deepCopy $.Values.draftDefaults) (deepCopy .) }}
{{- $drafts = append $drafts $draft }}
{{- end }}
{{- toYaml $drafts }}
{{- end }}

{{- define "outrider.ranksPerNode" -}}
{{- div (int .Values.target.tensorParallelSize) (int .Values.target.nodes) }}
{{- end }}

{{/* Draft workers that sit with rank 0: all, and those on GPUs. */}}
{{- define "outrider.guests" -}}
{{- $all := 0 }}{{- $gpus := 0 }}
{{- range (include "outrider.drafts" . | fromYamlArray) }}
{{- if eq .placement "sameNode" }}
{{- $all = add $all (int .replicas) }}
{{- if eq .device "cuda" }}{{- $gpus = add $gpus (int .replicas) }}{{- end }}
{{- end }}
{{- end }}
all: {{ $all }}
gpus: {{ $gpus }}
{{- end }}

{{/* What the schema cannot say. */}}
{{- define "outrider.check" -}}
{{- $target := .Values.target }}
{{- if mod (int $target.tensorParallelSize) (int $target.nodes) }}
{{- fail (printf "target.nodes is %d, which does not divide target.tensorParallelSize, %d" (int $target.nodes) (int $target.tensorParallelSize)) }}
{{- end }}
{{- $names := list }}
{{- range .Values.drafts }}
{{- if has .name $names }}{{- fail (printf "drafts: the name %q is there twice" .name) }}{{- end }}
{{- $names = append $names .name }}
{{- end }}
{{- $needed := add (int (include "outrider.ranksPerNode" .)) (index (include "outrider.guests" . | fromYaml) "all") | int }}
{{- $cpu := toString $target.resources.limits.cpu }}
{{- if and (regexMatch "^[0-9]+$" $cpu) (lt (int $cpu) $needed) }}
{{- fail (printf "target.resources.limits.cpu is %s, but the ranks and drafts of a pod take a CPU each: %d" $cpu $needed) }}
{{- end }}
{{- if and .Values.tls.enabled (not .Values.tls.existingSecret) (not .Values.tls.certManager.issuerName) }}
{{- fail "tls.certManager.issuerName is missing: tls.enabled is true and tls.existingSecret names no secret" }}
{{- end }}
{{- if and .Values.redis.external.tls.caSecretName (not .Values.redis.external.tls.enabled) }}
{{- fail "redis.external.tls.caSecretName is set, but redis.external.tls.enabled is false" }}
{{- end }}
{{- if and (not .Values.redis.enabled) .Values.redis.external.passwordRequired (not .Values.redis.auth.existingSecret) }}
{{- fail "redis.auth.existingSecret is missing: redis.external.passwordRequired is true" }}
{{- end }}
{{- if include "outrider.isBoundToOneNode" . }}
{{- if gt (int $target.nodes) 1 }}{{- fail (printf "models.accessModes allows one node, but target.nodes is %d" (int $target.nodes)) }}{{- end }}
{{- range (include "outrider.drafts" . | fromYamlArray) }}
{{- if ne .placement "sameNode" }}{{- fail (printf "models.accessModes allows one node, but the placement of drafts %q is %s" .name .placement) }}{{- end }}
{{- end }}
{{- end }}
{{- $ports := dict }}
{{- range $key, $port := dict "routerSpec.containerPort" .Values.routerSpec.containerPort "routerSpec.groupPort" .Values.routerSpec.groupPort "routerSpec.http.port" (ternary .Values.routerSpec.http.port 0 .Values.routerSpec.http.enabled) "metrics.port" .Values.metrics.port }}
{{- $name := toString (int $port) }}
{{- if hasKey $ports $name }}{{- fail (printf "%s is %s, which is %s too" $key $name (get $ports $name)) }}{{- end }}
{{- $_ := set $ports $name $key }}
{{- end }}
{{- /* In the pod of Ray's head. */}}
{{- range $key, $port := dict "metrics.port" .Values.metrics.port "rayCluster.head.gcsPort" .Values.rayCluster.head.gcsPort }}
{{- if has (toString (int $port)) (include "outrider.rayOwnPorts" $ | fromYamlArray) }}{{- fail (printf "%s is %d, which is a port of Ray's" $key (int $port)) }}{{- end }}
{{- end }}
{{- if eq (int .Values.metrics.port) (int .Values.rayCluster.head.gcsPort) }}
{{- fail (printf "metrics.port is %d, which is rayCluster.head.gcsPort too" (int .Values.metrics.port)) }}
{{- end }}
{{- $engines := list (dict "key" "target.%s" "engine" $target) }}
{{- range (include "outrider.drafts" . | fromYamlArray) }}{{- $engines = append $engines (dict "key" (printf "drafts: %%s of %q" .name) "engine" .) }}{{- end }}
{{- range $engines }}
{{- if and .engine.quantizationGroupSize (not .engine.quantization) }}
{{- fail (printf "%s is %d, but quantization is not set" (printf .key "quantizationGroupSize") (int .engine.quantizationGroupSize)) }}
{{- end }}
{{- if and (eq .engine.activationDtype "bfloat16") (ne .engine.dtype "bfloat16") (not .engine.quantization) }}
{{- fail (printf "%s is bfloat16, but dtype is %s and quantization is not set" (printf .key "activationDtype") .engine.dtype) }}
{{- end }}
{{- end }}
{{- with .Values.speculation }}
{{- if and .promptLookupMin .promptLookupMax (gt (int .promptLookupMin) (int .promptLookupMax)) }}
{{- fail (printf "speculation.promptLookupMin is %d, above speculation.promptLookupMax, which is %d" (int .promptLookupMin) (int .promptLookupMax)) }}
{{- end }}
{{- end }}
{{- if gt (int (default 0 .Values.routerSpec.maxNumSeqs)) (int $target.maxNumSeqs) }}
{{- fail (printf "routerSpec.maxNumSeqs is %d, but target.maxNumSeqs allows %d" (int .Values.routerSpec.maxNumSeqs) (int $target.maxNumSeqs)) }}
{{- end }}
{{- with .Values.routerSpec.autoscaling }}
{{- if .enabled }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}
{{- fail "routerSpec.autoscaling.minReplicas is above routerSpec.autoscaling.maxReplicas" }}
{{- end }}
{{- if not (or .targetCPUUtilizationPercentage (and .customMetrics (or .targetOpenRequests .targetTimeToFirstTokenMs))) }}
{{- fail "routerSpec.autoscaling.enabled is true, but nothing is to scale by: see targetCPUUtilizationPercentage and customMetrics there" }}
{{- end }}
{{- /* Kubernetes lets a policy of scaling look back half an hour at most. */}}
{{- if gt (int $.Values.routerSpec.drainSeconds) 1740 }}
{{- fail (printf "routerSpec.drainSeconds is %d, but routerSpec.autoscaling allows 1740 at most" (int $.Values.routerSpec.drainSeconds)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
