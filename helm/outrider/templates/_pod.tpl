{{/* Of every pod: nobody's root, no rights, no token of the API. */}}
{{- define "outrider.podSecurity" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .uid }}
  runAsGroup: {{ .uid }}
  fsGroup: {{ .uid }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "outrider.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities:
    drop: [ALL]
{{- end }}

{{/* Where pods go: .spec is one of the parts of the values. */}}
{{- define "outrider.scheduling" -}}
{{- with .spec.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $affinity := mergeOverwrite (deepCopy (default dict .affinity)) (deepCopy (default dict .spec.affinity)) }}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .spec.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{- define "outrider.modelMount" -}}
{{- if include "outrider.modelVolume" . }}
- name: models
  mountPath: {{ .Values.models.mountPath }}
  readOnly: true
{{- end }}
{{- end }}

{{- define "outrider.modelVolume" -}}
{{- with .Values.models }}
{{- if .volume }}
- name: models
  {{- toYaml .volume | nindent 2 }}
{{- else if or .existingClaim .create }}
- name: models
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-models" (include "outrider.fullname" $)) .existingClaim }}
    readOnly: true
{{- end }}
{{- end }}
{{- end }}

{{- define "outrider.scratchMounts" -}}
- name: tmp
  mountPath: /tmp
- name: state
  mountPath: {{ include "outrider.stateFolder" . }}
{{- end }}

{{- define "outrider.scratchVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 4Gi
- name: state
  emptyDir:
    sizeLimit: 1Gi
{{- end }}

{{- define "outrider.settingsVolume" -}}
- name: settings
  configMap:
    name: {{ include "outrider.fullname" . }}
{{- end }}

{{/* Resources of a container with GPUs beside what the values say. */}}
{{- define "outrider.resourcesWithGpus" -}}
{{- $resources := deepCopy .resources }}
{{- if .gpus }}
{{- $_ := set $resources.limits .gpuResource (toString .gpus) }}
{{- $requests := default dict $resources.requests }}
{{- $_ := set $requests .gpuResource (toString .gpus) }}
{{- $_ := set $resources "requests" $requests }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{/* Of every container that speaks to Redis: its password, and the CA of its certificate. */}}
{{- define "outrider.redisMounts" -}}
{{- if include "outrider.redisHasPassword" . }}
- name: redis-password
  mountPath: {{ include "outrider.redisFolder" . }}
  readOnly: true
{{- end }}
{{- if include "outrider.redisCaSecretName" . }}
- name: redis-ca
  mountPath: {{ include "outrider.redisCaFolder" . }}
  readOnly: true
{{- end }}
{{- end }}

{{- define "outrider.redisVolumes" -}}
{{- if include "outrider.redisHasPassword" . }}
- name: redis-password
  secret:
    secretName: {{ include "outrider.redisSecretName" . }}
    defaultMode: 0440
    items:
      - {key: password, path: password}
{{- end }}
{{- with (include "outrider.redisCaSecretName" .) }}
- name: redis-ca
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      - {key: {{ $.Values.redis.external.tls.caSecretKey | quote }}, path: ca.crt}
{{- end }}
{{- end }}

{{/* What is secret in a router: key pair and keys of clients. */}}
{{- define "outrider.secretMounts" -}}
{{- if .Values.tls.enabled }}
- name: tls
  mountPath: {{ include "outrider.tlsFolder" . }}
  readOnly: true
{{- end }}
{{- include "outrider.apiKeyMount" . }}
{{- end }}

{{- define "outrider.apiKeyMount" -}}
{{- if .Values.routerSpec.apiKey.existingSecret }}
- name: api-keys
  mountPath: {{ include "outrider.apiKeyFolder" . }}
  readOnly: true
{{- end }}
{{- end }}

{{- define "outrider.secretVolumes" -}}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "outrider.tlsSecretName" . }}
    defaultMode: 0440
{{- end }}
{{- include "outrider.apiKeyVolume" . }}
{{- end }}

{{- define "outrider.apiKeyVolume" -}}
{{- with .Values.routerSpec.apiKey }}
{{- if .existingSecret }}
- name: api-keys
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0440
    items:
      - {key: {{ .secretKey | quote }}, path: keys}
{{- end }}
{{- end }}
{{- end }}

{{/* The node of the target, where the models' claim can be mounted nowhere else. */}}
{{- define "outrider.modelAffinity" -}}
{{- if include "outrider.isBoundToOneNode" . }}
podAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: kubernetes.io/hostname
      labelSelector:
        matchLabels:
          {{- include "outrider.selectorLabels" . | nindent 10 }}
          app.kubernetes.io/component: target
{{- end }}
{{- end }}
