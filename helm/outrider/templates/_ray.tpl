{{- define "outrider.rayPorts" -}}
node-manager-port: {{ include "outrider.rayNodeManagerPort" . | quote }}
object-manager-port: {{ include "outrider.rayObjectManagerPort" . | quote }}
object-store-memory: "104857600"
{{- end }}

{{/* Of the container that KubeRay fills in `ray start` for: it is the first one of its pod. .port answers gRPC health. */}}
{{- define "outrider.rayContainer" -}}
image: {{ include "outrider.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
env:
  {{- include "outrider.env" .root | nindent 2 }}
  # Ray would run actors at niceness 15.
  - name: RAY_worker_niceness
    value: "0"
  {{- if and .isHead (include "outrider.redisCaSecretName" .root) }}
  - name: RAY_REDIS_CA_CERT
    value: {{ include "outrider.redisCaFolder" .root }}/ca.crt
  {{- end }}
lifecycle:
  preStop:
    exec:
      command: [sleep, {{ .root.Values.rayCluster.drainSeconds | quote }}]
startupProbe:
  grpc:
    port: {{ .port }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
livenessProbe:
  grpc:
    port: {{ .port }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc:
    port: {{ .port }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{ include "outrider.containerSecurity" .root }}
{{- end }}

{{- define "outrider.workerGroup" -}}
{{- $root := .root }}
- groupName: {{ .group }}
  replicas: {{ .replicas }}
  minReplicas: {{ .replicas }}
  maxReplicas: {{ .replicas }}
  rayStartParams:
    {{- include "outrider.rayPorts" $root | nindent 4 }}
  # Ties ranks and drafts to these pods.
  resources:
    {{- toYaml .rayResources | nindent 4 }}
  labels:
    outrider.io/role: {{ .role }}
    outrider.io/group: {{ .group }}
  template:
    metadata:
      labels:
        {{- include "outrider.podLabels" $root | nindent 8 }}
        app.kubernetes.io/component: {{ .role }}
        outrider.io/group: {{ .group }}
      {{- with .spec.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: {{ include "outrider.serviceAccountName" $root }}
      {{- include "outrider.podSecurity" (dict "uid" 10001) | nindent 6 }}
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      terminationGracePeriodSeconds: {{ add (int $root.Values.rayCluster.drainSeconds) 45 }}
      {{- include "outrider.scheduling" (dict "spec" .spec "affinity" .affinity) | nindent 6 }}
      containers:
        - name: ray-worker
          {{- include "outrider.rayContainer" (dict "root" $root "port" (include "outrider.rayNodeManagerPort" $root)) | nindent 10 }}
          resources:
            {{- include "outrider.resourcesWithGpus" (dict "resources" .spec.resources "gpus" .gpus "gpuResource" .spec.gpuResource) | nindent 12 }}
          volumeMounts:
            {{- include "outrider.scratchMounts" $root | nindent 12 }}
            - name: shm
              mountPath: /dev/shm
            {{- include "outrider.redisMounts" $root | nindent 12 }}
            {{- include "outrider.modelMount" $root | nindent 12 }}
      volumes:
        {{- include "outrider.scratchVolumes" $root | nindent 8 }}
        - name: shm
          emptyDir:
            medium: Memory
            sizeLimit: {{ .spec.shmSize }}
        {{- include "outrider.redisVolumes" $root | nindent 8 }}
        {{- include "outrider.modelVolume" $root | nindent 8 }}
{{- end }}

{{/* Where a pool's pods go in respect of the target's. */}}
{{- define "outrider.draftAffinity" -}}
{{ ternary "podAffinity" "podAntiAffinity" (eq .placement "sameZone") }}:
  requiredDuringSchedulingIgnoredDuringExecution:
    - topologyKey: {{ ternary "topology.kubernetes.io/zone" "kubernetes.io/hostname" (eq .placement "sameZone") }}
      labelSelector:
        matchLabels:
          {{- include "outrider.selectorLabels" .root | nindent 10 }}
          app.kubernetes.io/component: target
{{- end }}
